"""`DecodeShare`: which steps of a batch prefill, so that running answers keep a share of the time."""


class DecodeShare:
    """After a step with prefill, allows only steps without until answers had `share` of the time; 0 allows all.

    A step with prefill also decodes a token of each answer, whose seconds are those of the last step without.
    """

    def __init__(self, share: float) -> None:
        self._ratio = share / (1 - share)  # seconds of decoding for each second of prefill
        self._owed = 0.0  # seconds
        self._decode_seconds = 0.0  # of a step without prefill

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
