"""Numbers of a session and of its turns."""

from dataclasses import dataclass, replace

from mlx_tq.prompt_cache.tiers import Tiers
from mlx_tq.rescue import RescueStats
from mlx_tq.session.bring_back import Brought
from mlx_tq.session.looks import Looks
from mlx_tq.session.transcript import NOTHING, Rehydration


@dataclass(frozen=True)
class TurnStats:
    """The numbers of one turn.

    Attributes:
        prompt_tokens, generation_tokens: read and said.
        cached_tokens: of the prompt, those that the store of prefixes had.
        recalled: positions whose rows came back for the turn.
        by_meaning: of these, the ones that the rescue service's search named; the model's queries found the others.
        archived: tokens that were in the archive when it was last looked into.
        recall_seconds: that all looks into it took.
        looks, looks_seconds: of these, the ones while answering.
        rehydration: what was quoted.
        rescue_seconds: that it took to ask for it.
        ttft: seconds to the first token, those included.
        seconds: in all.
        prompt_tps, generation_tps: tokens a second.
        finish_reason: "stop", "length", or "interrupted".
    """

    prompt_tokens: int
    generation_tokens: int = 0
    recalled: tuple[int, ...] = ()
    by_meaning: tuple[int, ...] = ()
    archived: int = 0
    recall_seconds: float = 0.0
    looks: int = 0
    looks_seconds: float = 0.0
    rehydration: Rehydration = NOTHING
    rescue_seconds: float = 0.0
    ttft: float = 0.0
    seconds: float = 0.0
    prompt_tps: float = 0.0
    generation_tps: float = 0.0
    finish_reason: str = "interrupted"
    cached_tokens: int = 0

    def ended(self, looks: Looks, seconds: float) -> "TurnStats":
        """The same when the answer is complete, after these looks and so many seconds in all."""
        found = looks.brought()
        return replace(
            self,
            recalled=tuple(found.positions),
            archived=found.archived,
            recall_seconds=found.seconds,
            looks=looks.count,
            looks_seconds=looks.seconds,
            seconds=seconds,
        )


def turn_of(brought: Brought, prompt_tokens: int, cached_tokens: int) -> TurnStats:
    """Of a turn whose answer begins."""
    return TurnStats(
        prompt_tokens,
        by_meaning=brought.recalled.meaning,
        rehydration=brought.rehydration,
        rescue_seconds=brought.rescue_seconds,
        cached_tokens=cached_tokens,
    )


@dataclass(frozen=True)
class SessionStats:
    """What a conversation takes.

    Attributes:
        turns: so far.
        tokens: read and said, quotations included.
        live: of these, in the cache.
        recalled: tokens whose rows came back for the last turn.
        rescued: tokens of quotations.
        positions: that the model allows, or None.
        nbytes, fp16_nbytes: of the cache, and of the same tokens at 16 bits, those that left among them.
        rescue: what became of spans and questions, or None without rescue.
        tiers: where the rows of all tokens are.
    """

    turns: int
    tokens: int
    live: int
    recalled: int
    rescued: int
    positions: int | None
    nbytes: int
    fp16_nbytes: int
    rescue: RescueStats | None
    tiers: Tiers

    @property
    def evicted(self) -> int:
        """Tokens that are not in the cache any more."""
        return self.tokens - self.live
