"""`PromptLookup`: drafts tokens from where the last ones occurred before in a conversation."""

from collections.abc import Sequence

from mlx_tq.speculative.draft_gate import MAX_ROWS, DraftGate
from mlx_tq.speculative.ngram_index import NgramIndex

_DRAFT_SHARE = 0.5  # of the agreement


class PromptLookup:
    """The tokens of a conversation, and the draft that follows from them.

    Without a gate, half of the agreement is drafted whatever it costs.
    """

    def __init__(self, ids: Sequence[int], gate: DraftGate | None) -> None:
        self.gate = gate
        self.drafted = self.accepted = 0  # tokens
        self._index = NgramIndex(ids)
        self._match = self._index.longest_match()

    def __len__(self) -> int:
        return len(self._index)

    def append(self, token: int) -> None:
        """Add the next token of the conversation."""
        if self._match is not None and self.gate is not None:
            predicted = self._index.following(self._match.position, 1)[0]
            self.gate.note_prediction(self._match.agreement, is_right=predicted == token)
        self._index.append(token)
        self._match = self._index.longest_match()

    @property
    def may_draft(self) -> bool:
        """Whether `draft` may return tokens after the next `append`."""
        return bool(self.draft())

    def draft(self, limit: int = MAX_ROWS) -> list[int]:
        """Return the tokens to verify after the last one, at most `limit`; none if a plain step is better."""
        if self._match is None:
            return []
        length = min(limit, MAX_ROWS - 1, int(self._match.agreement * _DRAFT_SHARE))
        if self.gate is not None:
            length = self.gate.best_length(self._match.agreement, length)
        return self._index.following(self._match.position, length) if length > 0 else []
