"""The tiers of a context: rows in memory, rows on the disk, and tokens alone, which have to be read again."""

from dataclasses import dataclass

from mlx_tq.prompt_cache.archive import LIMIT
from mlx_tq.prompt_cache.plan import Plan


@dataclass(frozen=True)
class Tiers:
    """Where tokens are, and what that costs.

    Attributes:
        hot, hot_nbytes: tokens whose rows are live, and the bytes of memory that these take.
        cold, cold_nbytes: tokens whose rows are in the archive, and its bytes on the disk.
        recompute: tokens whose rows are nowhere. To have them back costs reading so many again.
    """

    hot: int
    hot_nbytes: int
    cold: int = 0
    cold_nbytes: int = 0
    recompute: int = 0


def planned_tiers(plan: Plan, tokens: int) -> Tiers:
    """Where a context of so many tokens will be, up to the archive's limit."""
    hot = min(tokens, plan.live(tokens))
    gone, cold, row = tokens - hot, 0, sum(layer.slot.heads * layer.row_bytes for layer in plan.layers)
    if plan.eviction is not None and plan.recalls:
        limit = plan.eviction.config.archive_limit
        cold = min(gone, (LIMIT if limit is None else limit) // row)
    return Tiers(hot, plan.nbytes(tokens), cold, cold * row, gone - cold)
