"""The ranks of a command: who they are, what they do not serve together, and what they show of each other."""

import argparse
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from mlx_tq.cli.args import MEAN_BITS, SHADOW, Option, field_of, option_value
from mlx_tq.cli.screen import console, human_bytes, table, warn
from mlx_tq.distributed.group import ALONE, Ranks, join
from mlx_tq.distributed.launch import is_launched
from mlx_tq.errors import ConfigError
from mlx_tq.prefix_cache.prefix_cache import OFF

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


@dataclass(frozen=True)
class RankStats:
    """What a conversation takes on one rank, and what agreeing with the others took.

    Attributes:
        rank: its number.
        nbytes, fp16_nbytes: of its part of the cache, and of that at 16 bits.
        evicted: tokens that left.
        calls, call_nbytes: to agree with the others: how many, and bytes that it put into them; sums of layers apart.
        warning: of its archive, or None.
    """

    rank: int
    nbytes: int
    fp16_nbytes: int
    evicted: int
    calls: int
    call_nbytes: int
    warning: str | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


class Measured(Protocol):
    """What a cache takes, as `CacheStats` and `SessionStats` have it."""

    @property
    def nbytes(self) -> int: ...
    @property
    def fp16_nbytes(self) -> int: ...
    @property
    def evicted(self) -> int: ...


def collect_stats(ranks: Ranks, cache: Measured, warning: str | None) -> list[RankStats]:
    """The numbers of every rank, on all of them; each gives its own."""
    own = RankStats(ranks.rank, cache.nbytes, cache.fp16_nbytes, cache.evicted, ranks.calls, ranks.nbytes, warning)
    return [RankStats(**each) for each in ranks.gather_json(own.to_dict())]


def show_ranks(found: list[RankStats]) -> None:
    """Print them, a row each, and what their archives warn of."""
    shown = table("", "rank", "KV cache", "fp16", "evicted", "agreed in", "bytes of that")
    for each in found:
        sizes = human_bytes(each.nbytes), human_bytes(each.fp16_nbytes)
        shown.add_row(str(each.rank), *sizes, f"{each.evicted:,}", f"{each.calls:,} calls", f"{each.call_nbytes:,}")
    console.print(shown)
    for each in found:
        if each.warning is not None:
            warn(f"rank {each.rank}: {each.warning}")
