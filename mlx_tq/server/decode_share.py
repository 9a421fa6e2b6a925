"""`DecodeShare`: which steps of a batch prefill, so that running answers keep a share of the time."""


class DecodeShare:
    """After a step that prefills, lets the batch only decode until answers have had `share` of the time.

    With share 0, every step may prefill. A step that prefills also decodes one token of each answer, which is taken to
    last as long as the last step that only decoded.
    """

    def __init__(self, share: float) -> None:
        self._ratio = share / (1 - share)  # seconds of decoding for each second of prefill
        self._owed = 0.0  # seconds
        self._decode_seconds = 0.0  # of the last step that only decoded

    def may_prefill(self, *, decodes: bool) -> bool:
        """Return whether the next step may prefill; always, if it has no answer to decode."""
        if not decodes:
            self._owed = 0.0
        return self._owed <= 0

    def count(self, seconds: float, *, prefilled: bool, decoded: bool) -> None:
        """Count a step."""
        if not decoded:
            return
        if prefilled:
            self._owed += max(0.0, seconds - self._decode_seconds) * self._ratio
            self._owed -= self._decode_seconds
        else:
            self._decode_seconds = seconds
            self._owed -= seconds
        self._owed = max(0.0, self._owed)  # decoding while no prompt waits is no credit
