"""`OpeningMark`: tells whether a text begins with a mark, while the text arrives in pieces."""


class OpeningMark:
    """Withholds the beginning of a text until it is certain whether the text begins with `mark`, after space."""

    def __init__(self, mark: str) -> None:
        self._mark, self._text = mark, ""

    def add(self, text: str, *, is_last: bool) -> tuple[bool, str] | None:
        """Add a piece; return whether the text begins with the mark, and the text, or None if that is not certain."""
        self._text += text
        start = self._text.lstrip()
        if self._mark.startswith(start) and start != self._mark and not is_last:
            return None
        return start.startswith(self._mark), self._text
