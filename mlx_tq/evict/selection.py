"""Which tokens leave, given what each is worth: modes v1, v2 and v3, in NumPy.

Source: TriAttention V3 (T. Turney): equal segments behind the prefix each give the same share, so that no part of the
context is lost whole.
"""

from typing import NamedTuple

import numpy as np

from mlx_tq.config import EvictConfig


class Span(NamedTuple):
    """What may leave: positions from `start` up to, and without, `stop`."""

    start: int
    stop: int


class _Items(NamedTuple):
    """Tokens, or blocks of them, that leave together: worth, first position and tokens of each, [N]."""

    worth: np.ndarray
    first: np.ndarray
    size: np.ndarray


def select(worth: np.ndarray, positions: np.ndarray, count: int, span: Span, config: EvictConfig) -> np.ndarray:
    """Choose the tokens that leave: those of least worth, the older where equal.

    With a granularity above 1, whole aligned blocks leave, up to one more than `count` asks for.

    Args:
        worth: of each live token, [S].
        positions: of each, ascending, int [S].
        count: tokens to choose, or all eligible ones where they are fewer.
        span: where eligible tokens lie.
        config: mode, segments, boundary_skip, granularity and pooling.

    Returns:
        Indices into `positions`, ascending.
    """
    eligible = (positions >= span.start) & (positions < span.stop)
    buckets = np.zeros(len(positions), np.int64)
    if config.mode != "v1":
        buckets, near = _buckets(positions, span, config)
        eligible &= ~near
    blocks = positions // config.granularity
    if config.granularity > 1:  # a block leaves whole or not at all
        last = int(positions[-1]) + 1 if len(positions) else 0
        broken = np.unique(blocks[~eligible])
        eligible &= ~np.isin(blocks, broken) & ((blocks + 1) * config.granularity <= last)
    index = np.flatnonzero(eligible)
    count = min(count, len(index))
    if count <= 0:
        return index[:0]
    starts = np.flatnonzero(np.diff(blocks[index], prepend=-1))
    items = _pool(worth[index], positions[index], starts, config)
    chosen = _choose(items, buckets[index][starts], count)
    leaves: np.ndarray = index[np.repeat(chosen, items.size)]
    return leaves


def _buckets(positions: np.ndarray, span: Span, config: EvictConfig) -> tuple[np.ndarray, np.ndarray]:
    """The segment of each position, and whether it lies within boundary_skip of a segment's edge: [S] each."""
    stop = max(span.stop, span.start + 1)
    count = -(-(stop - span.start) // config.segment_tokens) if config.segment_tokens else config.segments
    width = float(config.segment_tokens or (stop - span.start) / count)
    place = (positions - span.start) / width
    buckets = np.clip(place.astype(np.int64), 0, count - 1)
    edges = np.round(place)
    inner = (edges > 0) & (edges < count)
    near = inner & (np.abs(positions - (span.start + edges * width)) < config.boundary_skip)
    return buckets, near


def _pool(worth: np.ndarray, positions: np.ndarray, starts: np.ndarray, config: EvictConfig) -> _Items:
    """Blocks that begin at indices `starts`, and the pooled worth of each."""
    size = np.diff(starts, append=len(worth))
    if config.granularity == 1:
        return _Items(worth, positions, size)
    if config.pooling == "mean":
        pooled = np.add.reduceat(worth, starts) / size
    elif config.pooling == "max":
        pooled = np.maximum.reduceat(worth, starts)
    else:
        parts = np.split(worth, starts[1:])
        pooled = np.array([np.sort(part)[-max(1, len(part) // 8) :].mean() for part in parts])
    return _Items(pooled, positions[starts], size)


def _choose(items: _Items, buckets: np.ndarray, count: int) -> np.ndarray:
    """Whether each item leaves: every bucket's share first, then the worst of what is left. Bool [N]."""
    order = np.lexsort((items.first, items.worth))
    total = int(items.size.sum())
    chosen = np.zeros(len(order), bool)
    for bucket in np.unique(buckets):
        inside = order[buckets[order] == bucket]
        tokens = np.cumsum(items.size[inside])
        share = min(int(tokens[-1]) * count // total, count - int(items.size[chosen].sum()))
        chosen[inside[tokens <= share]] = True
    left = count - int(items.size[chosen].sum())
    rest = order[~chosen[order]]
    if left > 0:
        enough = int(np.searchsorted(np.cumsum(items.size[rest]), left)) + 1
        chosen[rest[:enough]] = True
    return chosen
