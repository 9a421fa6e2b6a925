"""The ranks of a command: who they are, what they do not serve together, and what they show of each other."""

import argparse
from typing import Any

from mlx_tq.cli.args import MEAN_BITS, SHADOW, Option, field_of, option_value
from mlx_tq.cli.screen import console, human_bytes, table, warn
from mlx_tq.distributed.group import ALONE, Ranks, join
from mlx_tq.distributed.launch import is_launched
from mlx_tq.errors import ConfigError
from mlx_tq.prefix_cache.prefix_cache import OFF
from mlx_tq.prompt_cache.statistics import CacheStats

# What several ranks cannot do: mlx-lm divides no such model, or a file would hold the part of one rank.
_FLAGS = ("--adapter-path", "--draft-model", "--image", "--prompt-cache-file", "--load")
_OPTIONS: tuple[Option, ...] = (SHADOW, MEAN_BITS)


def join_ranks(args: argparse.Namespace) -> Ranks:
    """The ranks that run this command, where `mlx.launch` started several; all but the first are silent from then on.

    Raises:
        ConfigError: a flag that several ranks do not serve.
        RankError: the others cannot be reached.
    """
    ranks = join() if is_launched() else ALONE
    if ranks.is_alone:
        return ranks
    given = [flag for flag in _FLAGS if getattr(args, field_of(flag), None)]
    options = [option for option in _OPTIONS if hasattr(args, field_of(option.flag))]
    given += [option.flag for option in options if option_value(args, option) not in (None, OFF)]
    if given:
        raise ConfigError(f"{given[0]} is for one process, and {ranks.size} ranks were started. Drop one of the two.")
    console.quiet = not ranks.is_first
    return ranks


def collect_stats(ranks: Ranks, cache: CacheStats, warning: str | None) -> list[dict[str, Any]]:
    """Return, on every rank, the cache statistics of each with its collective calls and its archive's warning."""
    calls = {"rank": ranks.rank, "calls": ranks.calls, "call_nbytes": ranks.nbytes, "warning": warning}
    return ranks.gather_json(cache.to_dict() | calls)


def show_ranks(stats: list[dict[str, Any]]) -> None:
    """Print a row for each rank, and the warnings of their archives."""
    shown = table("", "rank", "KV cache", "fp16", "evicted", "agreed in", "bytes of that")
    for rank in stats:
        sizes = human_bytes(rank["nbytes"]), human_bytes(rank["fp16_nbytes"])
        calls = f"{rank['calls']:,} calls", f"{rank['call_nbytes']:,}"
        shown.add_row(str(rank["rank"]), *sizes, f"{rank['evicted']:,}", *calls)
    console.print(shown)
    for rank in stats:
        if rank["warning"] is not None:
            warn(f"rank {rank['rank']}: {rank['warning']}")
