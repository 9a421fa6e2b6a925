"""The selection of the tokens to evict, given the score of each.

Source: TriAttention V3 (T. Turney): each of several equal segments loses the same share of its tokens, so that no part
of the context is lost whole.
"""

from typing import NamedTuple

import numpy as np

from mlx_tq.policies.policy import Policy


class PositionRange(NamedTuple):
    """Positions from `start` up to, but not including, `stop`."""

    start: int
    stop: int


def select(
    scores: np.ndarray, positions: np.ndarray, count: int, eligible_range: PositionRange, policy: Policy
) -> np.ndarray:
    """Return the indices, ascending, of the `count` tokens with the lowest scores, the older ones of equals.

    `positions` are ascending, int [S]. With a granularity above 1, whole aligned blocks are chosen, up to one more than
    `count` requires.
    """
    is_eligible = (positions >= eligible_range.start) & (positions < eligible_range.stop)
    blocks = positions // policy.granularity
    if policy.granularity > 1:  # blocks that are incomplete, or partly protected, stay
        length = int(positions[-1]) + 1 if len(positions) else 0
        protected = np.unique(blocks[~is_eligible])
        is_eligible &= ~np.isin(blocks, protected) & ((blocks + 1) * policy.granularity <= length)
    eligible = np.flatnonzero(is_eligible)
    count = min(count, len(eligible))
    if count <= 0:
        return eligible[:0]
    scores, positions = scores[eligible], positions[eligible]
    starts = np.flatnonzero(np.diff(blocks[eligible], prepend=-1))
    sizes = np.diff(starts, append=len(scores))
    first = positions[starts]
    segments = policy.segment_numbers(first, *eligible_range)
    block_scores = scores if policy.granularity == 1 else policy.pool_blocks(scores, starts)
    order = np.lexsort((first, block_scores))  # of blocks, lowest first
    evicted = np.zeros(len(order), bool)
    for segment in np.unique(segments):  # the share of every segment, then the lowest of the rest
        inside = order[segments[order] == segment]
        tokens = np.cumsum(sizes[inside])
        share = min(int(tokens[-1]) * count // len(eligible), count - int(sizes[evicted].sum()))
        evicted[inside[tokens <= share]] = True
    missing = count - int(sizes[evicted].sum())
    if missing > 0:
        rest = order[~evicted[order]]
        enough = int(np.searchsorted(np.cumsum(sizes[rest]), missing)) + 1
        evicted[rest[:enough]] = True
    indices: np.ndarray = eligible[np.repeat(evicted, sizes)]
    return indices
