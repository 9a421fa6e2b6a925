"""Which tokens leave, given the score of each: modes v1, v2 and v3, in NumPy.

Source: TriAttention V3 (T. Turney): equal segments behind the sinks each give the same share, so that no part of the
context is lost whole.
"""

from typing import NamedTuple

import numpy as np

from mlx_tq.policies.policy import Policy


class PositionRange(NamedTuple):
    """What may leave: positions from `start` up to, and without, `stop`."""

    start: int
    stop: int


class _Items(NamedTuple):
    """Tokens, or blocks of them, that leave together: score, first position and tokens of each, [N]."""

    scores: np.ndarray
    first: np.ndarray
    size: np.ndarray


def select(
    scores: np.ndarray, positions: np.ndarray, count: int, eligible_range: PositionRange, policy: Policy
) -> np.ndarray:
    """Choose the tokens that leave: those with the lowest scores, the older where equal.

    With a granularity above 1, whole aligned blocks leave, up to one more than `count` asks for.

    Args:
        scores: of each live token, [S].
        positions: of each, ascending, int [S].
        count: tokens to choose, or all eligible ones where they are fewer.
        eligible_range: where eligible tokens lie.
        policy: mode, segments, granularity and pooling.

    Returns:
        Indices into `positions`, ascending.
    """
    eligible = (positions >= eligible_range.start) & (positions < eligible_range.stop)
    blocks = positions // policy.granularity
    if policy.granularity > 1:  # a block leaves whole or not at all
        last = int(positions[-1]) + 1 if len(positions) else 0
        broken = np.unique(blocks[~eligible])
        eligible &= ~np.isin(blocks, broken) & ((blocks + 1) * policy.granularity <= last)
    index = np.flatnonzero(eligible)
    count = min(count, len(index))
    if count <= 0:
        return index[:0]
    starts = np.flatnonzero(np.diff(blocks[index], prepend=-1))
    items = _pool(scores[index], positions[index], starts, policy)
    chosen = _choose(items, _segments(items.first, eligible_range, policy), count)
    leaves: np.ndarray = index[np.repeat(chosen, items.size)]
    return leaves


def _segments(positions: np.ndarray, eligible_range: PositionRange, policy: Policy) -> np.ndarray:
    """The number of the segment that each position lies in, int64 [N]; a single one where there are no segments."""
    if policy.mode == "v1" or not policy.segmented:
        return np.zeros(len(positions), np.int64)
    start, stop = eligible_range.start, max(eligible_range.stop, eligible_range.start + 1)
    count = -(-(stop - start) // policy.segment_tokens) if policy.segment_tokens else policy.segments
    width = float(policy.segment_tokens or (stop - start) / count)
    numbers: np.ndarray = np.clip(((positions - start) / width).astype(np.int64), 0, count - 1)
    return numbers


def _pool(scores: np.ndarray, positions: np.ndarray, starts: np.ndarray, policy: Policy) -> _Items:
    """Blocks that begin at indices `starts`, and the pooled score of each."""
    size = np.diff(starts, append=len(scores))
    if policy.granularity == 1:
        return _Items(scores, positions, size)
    if policy.pooling == "mean":
        pooled = np.add.reduceat(scores, starts) / size
    elif policy.pooling == "max":
        pooled = np.maximum.reduceat(scores, starts)
    else:
        parts = np.split(scores, starts[1:])
        pooled = np.array([np.sort(part)[-max(1, len(part) // 8) :].mean() for part in parts])
    return _Items(pooled, positions[starts], size)


def _choose(items: _Items, segments: np.ndarray, count: int) -> np.ndarray:
    """Whether each item leaves: every segment's share first, then the lowest of what is left. Bool [N]."""
    order = np.lexsort((items.first, items.scores))
    total = int(items.size.sum())
    chosen = np.zeros(len(order), bool)
    for segment in np.unique(segments):
        inside = order[segments[order] == segment]
        tokens = np.cumsum(items.size[inside])
        share = min(int(tokens[-1]) * count // total, count - int(items.size[chosen].sum()))
        chosen[inside[tokens <= share]] = True
    left = count - int(items.size[chosen].sum())
    rest = order[~chosen[order]]
    if left > 0:
        enough = int(np.searchsorted(np.cumsum(items.size[rest]), left)) + 1
        chosen[rest[:enough]] = True
    return chosen
