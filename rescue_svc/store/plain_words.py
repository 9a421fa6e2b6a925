"""The words of a text, which both stores index: two spellings of a word are one, however they are encoded."""

import re
import unicodedata

_WORD = re.compile(r"[^\W_]+")


def plain_words(text: str) -> list[str]:
    """Return the words of a text without case, diacritics and compatibility forms (Unicode's NFKD)."""
    if text.isascii():
        return _WORD.findall(text.lower())
    # Case folding alone keeps Cherokee in capitals; and it composes and decomposes letters.
    folded = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold().lower())
    letters = (c for c in folded if not unicodedata.combining(c))
    # PostgreSQL's parser drops numbers that are not digits.
    return _WORD.findall("".join(" " if unicodedata.category(c) == "No" else c for c in letters))
