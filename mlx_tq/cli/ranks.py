"""The processes that run one command together: how they join, and what they report of each other."""

from typing import Any

from mlx_tq.cli.options import SINGLE_PROCESS, Request
from mlx_tq.cli.screen import console, human_bytes, table, warn
from mlx_tq.distributed.group import ALONE, Ranks, join
from mlx_tq.distributed.launch import is_launched
from mlx_tq.errors import ConfigError
from mlx_tq.prompt_cache.statistics import CacheStats


def join_ranks(request: Request) -> Ranks:
    """Join the processes that `mlx.launch` started, if it did; all but the first write nothing from then on."""
    ranks = join() if is_launched() else ALONE
    if ranks.is_alone:
        return ranks
    for flag in SINGLE_PROCESS:
        if flag in request.args.typed or request.values.get(flag) is not None:
            raise ConfigError(
                f"{flag} needs a single process, and {ranks.size} ranks were started. Drop one of the two."
            )
    console.quiet = not ranks.is_first
    return ranks


def collect_stats(ranks: Ranks, cache: CacheStats, warning: str | None) -> list[dict[str, Any]]:
    """Return, on every rank, the cache statistics of each with its collective calls and its archive's warning."""
    calls = {"rank": ranks.rank, "calls": ranks.calls, "call_nbytes": ranks.nbytes, "warning": warning}
    return ranks.gather_json(cache.to_dict() | calls)


def show_ranks(stats: list[dict[str, Any]]) -> None:
    rows = table("", "rank", "KV cache", "fp16", "evicted", "collective calls", "collective bytes")
    for rank in stats:
        sizes = human_bytes(rank["nbytes"]), human_bytes(rank["fp16_nbytes"])
        rows.add_row(str(rank["rank"]), *sizes, *(f"{rank[name]:,}" for name in ("evicted", "calls", "call_nbytes")))
    console.print(rows)
    for rank in stats:
        if rank["warning"] is not None:
            warn(f"rank {rank['rank']}: {rank['warning']}")
