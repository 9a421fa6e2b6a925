"""`DraftGate`: decides how many drafted tokens are worth a pass, from their acceptance and from what passes cost."""

MAX_ROWS = 8  # tokens of a verify pass: the last one and the draft; compressed caches see up to 8 one by one
_FIRST_ROWS = 3  # of a verify pass before any was timed: some BLAS take as long for each token as for the first
_LEAST_GAIN = 1.05  # expected tokens per time of a plain step
_COST_OF_ROW = 0.1  # assumed of each further token of a pass, in plain steps
_NEW_SAMPLE = 0.25  # weight of a new time in a moving mean
_FIRST_ACCEPTANCE, _PRIOR_WEIGHT = 0.1, 2.0  # so that nothing is drafted before a prediction was right
_FORGET_ACCEPTANCE = 0.97  # weight of older tokens
_FORGET_COST = 0.998  # per plain step, so that one slow pass does not end all drafts
_COST_PRIOR = 0.1  # weight of the assumed cost


class DraftGate:
    """Counts which drafts were right and times passes; chooses the draft with the greatest expected gain.

    Right and wrong predictions also count while nothing is drafted, so the gate opens when a text begins to repeat.
    With `first_compiles`, the first pass of each length may compile kernels, so its time does not count.
    """

    def __init__(self, *, first_compiles: bool = False) -> None:
        self._uncompiled = set(range(2, MAX_ROWS + 1)) if first_compiles else set()  # lengths of passes
        # By class of agreement: decayed numbers of right and of all predictions.
        self._counts: dict[int, tuple[float, float]] = {}
        self._plain_s = 0.0  # moving mean of a plain step; 0 before the first
        self._pass_s: dict[int, float] = {}  # moving mean of a verify pass, by its tokens
        self._weights: dict[int, float] = {}  # of these means, against the assumed cost

    def note_prediction(self, agreement: int, *, is_right: bool) -> None:
        right, total = self._counts.get(_class_of(agreement), (0.0, 0.0))
        decay = _FORGET_ACCEPTANCE
        self._counts[_class_of(agreement)] = (right * decay + is_right, total * decay + 1)

    def note_plain_step(self, seconds: float) -> None:
        self._plain_s += (seconds - self._plain_s) * (_NEW_SAMPLE if self._plain_s else 1)
        self._weights = {rows: weight * _FORGET_COST for rows, weight in self._weights.items()}

    def note_verify_pass(self, rows: int, seconds: float) -> None:
        if rows in self._uncompiled:
            self._uncompiled.remove(rows)
            return
        mean = self._pass_s.get(rows)
        self._pass_s[rows] = seconds if mean is None else mean + (seconds - mean) * _NEW_SAMPLE
        self._weights[rows] = 1.0

    def acceptance(self, agreement: int) -> float:
        """Return the expected share of right predictions after `agreement` tokens that agree.

        Without predictions in a class of agreement, that is the share in the class below.
        """
        share = _FIRST_ACCEPTANCE
        for number in range(_class_of(agreement) + 1):
            right, total = self._counts.get(number, (0.0, 0.0))
            share = (right + _PRIOR_WEIGHT * share) / (total + _PRIOR_WEIGHT)
        return share

    def cost(self, rows: int) -> float:
        """Return the expected time of a pass of `rows` tokens, in plain steps."""
        assumed = 1 + _COST_OF_ROW * (rows - 1)
        if not self._pass_s or not self._plain_s:
            return assumed
        timed = min(self._pass_s, key=lambda other: abs(other - rows))
        per_row = max(0.0, self._pass_s[timed] / self._plain_s - 1) / (timed - 1)
        weight = self._weights[timed]
        return (weight * (1 + per_row * (rows - 1)) + _COST_PRIOR * assumed) / (weight + _COST_PRIOR)

    def best_length(self, agreement: int, limit: int) -> int:
        """Return how many tokens, up to `limit`, to draft after `agreement` equal ones; 0 if plain steps are faster."""
        most = min(limit, MAX_ROWS - 1 if self._pass_s else _FIRST_ROWS - 1)
        best, best_gain = 0, _LEAST_GAIN
        expected, chance = 1.0, 1.0
        for length in range(1, most + 1):
            chance *= self.acceptance(agreement + length - 1)
            expected += chance
            gain = expected / self.cost(length + 1)
            if gain > best_gain:
                best, best_gain = length, gain
        return best


def _class_of(agreement: int) -> int:
    return min(agreement, 32).bit_length()  # 3, 4 to 7, 8 to 15, ...
