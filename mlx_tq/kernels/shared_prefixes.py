"""Finds which caches of a batch begin with the same packed rows, so that attention reads these once for all of them."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from mlx_tq.kernels.regions import Regions, SharedRows


class SharedPrefix(NamedTuple):
    """Packed tokens that several caches share, found by buffer identity. Their sink tokens are the same as well."""

    members: tuple[int, ...]  # numbers of the caches in the batch, ascending
    tokens: int


def find_shared_prefixes(batch: Sequence[Regions]) -> list[SharedPrefix]:
    """Return prefixes of at least two caches.

    Each cache gets at most one prefix; caches whose heads keep different tokens get none.
    """
    if len(batch) < 2:
        return []
    by_buffer: dict[int, list[int]] = defaultdict(list)
    buffers = [regions.packed_buffers() for regions in batch]
    for number, parts in enumerate(buffers):
        if parts:
            by_buffer[id(parts[0].rows)].append(number)
    return [prefix for members in by_buffer.values() for prefix in _divide(members, buffers)]


def _divide(members: list[int], buffers: list[tuple[SharedRows, ...]]) -> list[SharedPrefix]:
    """Group caches with the same first buffer greedily.

    Each group maximizes the prefix length times the number of caches after the first.
    """
    prefixes = []
    while len(members) > 1:
        longest = max(members, key=lambda number: buffers[number][0].tokens)
        common = {number: _common_tokens(buffers[longest], buffers[number]) for number in members}
        lengths = sorted(common.values(), reverse=True)
        tokens = max(lengths[1:], key=lambda least: least * (sum(n >= least for n in lengths) - 1))
        prefixes.append(SharedPrefix(tuple(number for number in members if common[number] >= tokens), tokens))
        members = [number for number in members if common[number] < tokens]
    return prefixes


def _common_tokens(one: tuple[SharedRows, ...], other: tuple[SharedRows, ...]) -> int:
    tokens = 0
    for a, b in zip(one, other, strict=False):
        if a.rows is not b.rows:
            break
        tokens += min(a.tokens, b.tokens)
        if a.tokens != b.tokens:
            break
    return tokens
