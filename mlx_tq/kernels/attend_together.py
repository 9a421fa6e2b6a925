"""Attention of a batch on a GPU, in as few calls as it takes. Rows that several have are read once, for all of them.

Queries of N sequences that share rows are N times as many queries of one sequence; what these find is merged with what
each finds in rows of its own (Juravsky et al. 2024: Hydragen).
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import mlx.core as mx

from mlx_tq.kernels.attend_kernels import Blocks, Question, most_together
from mlx_tq.kernels.constants import check_can_run
from mlx_tq.kernels.masks import Mask
from mlx_tq.kernels.regions import Regions


def attend_gpu(
    queries: mx.array,
    batch: Sequence[Regions],
    *,
    scale: float,
    mask: Mask = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention of queries [B, Hq, L, Dk] over the regions of all B, or over those of each.

    Arrays of the regions that are not contiguous are copied. A mask array is for one region.

    Raises:
        KernelUnavailableError: there is no GPU, its compiler refuses the kernel, or kernels do not have the format,
            rotation, head size or type; `attend_ref` does.
    """
    check_can_run(batch[0].layout, queries.dtype, batch[0].full_keys.dtype)
    if isinstance(mask, mx.array):
        batch = [_undivided(regions) for regions in batch]
    normalized = any(regions.normalization is not None for regions in batch)
    together = most_together(batch[0].layout, normalized=normalized)
    sources = 1 if len(batch) == 1 else together
    found = []
    for start, stop in [(0, 1)] if len(batch) == 1 else _runs(batch, together):
        rows = queries if len(batch) == 1 else queries[start:stop]
        question, run = Question(rows, sources, normalized, scale, mask), batch[start:stop]
        attend = _attend_shared if run[0].shared else Question.attended
        found.append(attend(question, run, sinks))
    return found[0] if len(found) == 1 else mx.concatenate(found)


def _undivided(regions: Regions) -> Regions:
    """The same with no shared rows."""
    return replace(regions, rows=regions.packed(), shared=()) if regions.shared else regions


def _runs(batch: Sequence[Regions], most: int) -> list[tuple[int, int]]:
    """Neighbours that share the same rows, or none: up to `most` a run."""
    edges = [0]
    for i, regions in enumerate(batch):
        if i - edges[-1] == most or _names(regions) != _names(batch[edges[-1]]):
            edges.append(i)
    return list(pairwise([*edges, len(batch)]))


def _names(regions: Regions) -> list[tuple[int, int]]:
    return [(id(rows), count) for rows, count in regions.shared]


def _attend_shared(question: Question, batch: Sequence[Regions], sinks: mx.array | None) -> mx.array:
    """Attention of a run."""
    queries = question.queries
    rows, heads, length, dim = queries.shape
    alone = len(batch) == 1
    folded = queries if alone else queries.swapaxes(0, 1).reshape(1, heads, rows * length, dim)
    asked = replace(question, queries=folded, sources=1, mask=None)
    parts, first = [], 0
    for shared in batch[0].shared:
        part = _part(batch[0], first, shared.tokens, shared.rows)
        parts.append(asked.blocks([replace(part, sink_tokens=0, beside=0)]))
        first += shared.tokens
    own = question.blocks([_part(regions, first, regions.body - first, regions.rows) for regions in batch])
    outputs, maxima, sums = (
        mx.concatenate([*(_unfolded(each, queries.shape, alone=alone) for each in found), mine], axis=3)
        for *found, mine in zip(*(part[:3] for part in (*parts, own)), strict=True)
    )
    before = sum(part.cuts[0][1] for part in parts)
    sizes = list(own.sizes)
    for at in range(8, 8 + 8 * rows, 8):
        sizes[at + 5 : at + 8] = [number + before for number in sizes[at + 5 : at + 8]]
    return question.merged(Blocks(outputs, maxima, sums, sizes, own.cuts), batch[0].layout, sinks)


def _part(regions: Regions, first: int, count: int, rows: mx.array | None) -> Regions:
    """The regions with `count` tokens from `first` on as their body, in rows of their own."""
    known = regions.normalization and regions.normalization.after(first)
    return replace(regions, rows=rows, body=count, shared=(), normalization=known)


def _unfolded(found: mx.array, shape: tuple[int, ...], *, alone: bool) -> mx.array:
    """[1, Hq, B L, ...] as [B, Hq, L, ...]."""
    if alone:
        return found
    rows, heads, length, _ = shape
    return found.reshape(heads, rows, length, *found.shape[3:]).swapaxes(0, 1)
