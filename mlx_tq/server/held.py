"""What the caches of a session hold after an answer."""

from dataclasses import dataclass
from typing import Any

from mlx_tq.prompt_cache.plan import Plan
from mlx_tq.prompt_cache.statistics import cache_stats
from mlx_tq.session.recall import Recalled


@dataclass(frozen=True)
class Held:
    """Tokens and bytes of a session.

    Attributes:
        tokens: that were read and said.
        evicted: of these, not in the cache any more.
        archived, archived_nbytes: of those, on disk for a question that needs them, and the bytes there.
        recalled: of those, back for the last question.
        by_meaning: of those, named by the rescue service's search; the model's queries found the others.
        recall_seconds: which that took.
        nbytes, fp16_nbytes: of the caches, and of all the tokens at 16 bits.
    """

    tokens: int
    evicted: int
    archived: int
    archived_nbytes: int
    recalled: int
    by_meaning: int
    recall_seconds: float
    nbytes: int
    fp16_nbytes: int


def what_is_held(caches: list[Any], plan: Plan | None, recalled: Recalled) -> Held:
    """Measure the caches of a session, which must be computed; `plan` is None for mlx-lm's own.

    Args:
        caches: after the answer.
        plan: how they were made.
        recalled: what came back as rows for it.
    """
    stats = cache_stats(caches, plan)
    return Held(
        tokens=stats.tokens,
        evicted=stats.evicted,
        archived=stats.archived,
        archived_nbytes=stats.archived_nbytes,
        recalled=len(recalled.positions),
        by_meaning=len(recalled.meaning),
        recall_seconds=recalled.seconds,
        nbytes=stats.nbytes,
        fp16_nbytes=stats.fp16_nbytes,
    )
