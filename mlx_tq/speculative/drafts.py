"""`Drafts` and `Drafter`: the interface between a source of drafts and the code that verifies them."""

from collections.abc import Sequence
from typing import Any, Protocol

from mlx_tq.speculative.draft_gate import DraftGate


class Drafts(Protocol):
    """The drafts for one answer."""

    @property
    def gate(self) -> DraftGate | None:
        """The gate that is told how long passes take, if there is one."""

    @property
    def may_draft(self) -> bool:
        """Whether `draft` may return tokens after the next `append`."""

    def __len__(self) -> int:
        """Return the number of tokens of the conversation."""

    def append(self, token: int) -> None:
        """Add the next token of the conversation."""

    def draft(self, limit: int, /) -> list[int]:
        """Return the tokens to verify after the last one, at most `limit`."""


class Drafter(Protocol):
    """A source of drafts for the conversations with one model."""

    def check(self, model: Any, caches: list[Any]) -> None:
        """Raise ConfigError if drafts are required but cannot be verified on these caches."""

    def begin(self, model: Any, caches: list[Any], ids: Sequence[int]) -> Drafts | None:
        """Return the drafts for an answer to a conversation of tokens `ids`, or None if nothing is drafted."""
