"""Attention to a layer whose KV heads keep different tokens.

Kernels take all heads in one call. In the reference implementation, for a few queries, each KV head is a cache of a
batch. For many, as on a GPU, heads that keep the same tokens attend together, and heads with a window in chunks of
queries.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np

from mlx_tq.kernels import backend
from mlx_tq.kernels.attend import attend_batch
from mlx_tq.kernels.attend_gpu import launch_attend, launch_attend_batch, most_sources
from mlx_tq.kernels.cpu import attend as cpu_attend
from mlx_tq.kernels.prefill import prefill
from mlx_tq.kernels.regions import HeadRows, Mask, Regions

LEAST_RUN = 256  # queries of a window that attend together


def attend_by_head(
    queries: mx.array, regions: Regions, *, scale: float, mask: Mask = None, sinks: mx.array | None = None
) -> mx.array:
    """Return what `attend` returns; `mask` is no array."""
    return attend_batch_by_head(queries, [regions], scale=scale, mask=mask, sinks=sinks)


def _launch_batch_by_head(
    queries: mx.array, batch: Sequence[Regions], *, scale: float, mask: Mask = None, sinks: mx.array | None = None
) -> mx.array:
    """Attend in one call, or in several where a cache has more groups than its arrays, or groups with shared rows."""
    layout, normalized = batch[0].layout, any(regions.normalization is not None for regions in batch)
    most = most_sources(layout, normalized=normalized)

    def attend_part(part: mx.array, regions: Regions, _group: HeadRows, logits: mx.array | None) -> mx.array:
        return launch_attend(part, regions, scale=scale, mask=mask, sinks=logits)

    shared = [any(group.shared for group in regions.groups) for regions in batch]
    if not any(shared) and all(len(regions.groups) <= most for regions in batch):
        return launch_attend_batch(queries, batch, scale=scale, mask=mask, sinks=sinks)
    outputs = []
    for i, regions in enumerate(batch):
        groups, size = regions.groups or (regions.as_group(),), 1 if shared[i] else most
        parts = [groups[start : start + size] for start in range(0, len(groups), size)]
        outputs.append(_attend_in_parts(queries[i : i + 1], regions, parts, sinks, attend_part))
    return mx.concatenate(outputs)


@backend.dispatch(_launch_batch_by_head, cpu_attend.launch_batch_by_head)
def attend_batch_by_head(
    queries: mx.array, batch: Sequence[Regions], *, scale: float, mask: Mask = None, sinks: mx.array | None = None
) -> mx.array:
    """Return what `attend_batch` returns; in some of the caches, all heads may keep the same tokens."""
    if sinks is not None:  # which differ from head to head, and those of a batch do not
        run = [attend_by_group if regions.groups else prefill for regions in batch]
        outputs = [
            attend(queries[i : i + 1], regions, scale=scale, mask=mask, sinks=sinks)
            for i, (attend, regions) in enumerate(zip(run, batch, strict=True))
        ]
        return mx.concatenate(outputs)
    rows, query_heads, length, dim = queries.shape
    heads = batch[0].full_keys.shape[1]
    by_head = [regions.head(head) for regions in batch for head in range(heads)]
    out = attend_batch(queries.reshape(rows * heads, -1, length, dim), by_head, scale=scale, mask=mask)
    return out.reshape(rows, query_heads, length, -1)


@backend.dispatch(cpu=cpu_attend.launch_by_group)
def attend_by_group(
    queries: mx.array, regions: Regions, *, scale: float, mask: Mask = None, sinks: mx.array | None = None
) -> mx.array:
    """Return what `prefill` returns, at batch size 1; `mask` is no array."""

    def attend_part(part: mx.array, regions: Regions, group: HeadRows, logits: mx.array | None) -> mx.array:
        if group.window is None:
            return prefill(part, regions, scale=scale, mask=mask, sinks=logits)
        return _attend_window(part, regions, group, scale, logits)

    return _attend_in_parts(queries, regions, [(group,) for group in regions.groups], sinks, attend_part)


# Attends with query heads to the regions of their groups, of which it gets the first, with attention-sink logits.
_AttendPart = Callable[[mx.array, Regions, HeadRows, mx.array | None], mx.array]


def _attend_in_parts(
    queries: mx.array,
    regions: Regions,
    parts: Sequence[tuple[HeadRows, ...]],
    sinks: mx.array | None,
    attend_part: _AttendPart,
) -> mx.array:
    """Attend to some groups at a time, at batch size 1."""
    members: list[int] = []  # query heads, in the order of the outputs
    outputs: list[mx.array] = []
    size = queries.shape[1] // regions.full_keys.shape[1]
    for groups in parts:
        query_heads = sorted(head for group in groups for head in group.query_heads(size))
        members += query_heads
        index = mx.array(query_heads)
        # One after another: mlx would otherwise decode the rows of all groups at once.
        part = mx.depends(mx.take(queries, index, axis=1), outputs[-1:])
        logits = None if sinks is None else mx.take(sinks, index)
        outputs.append(attend_part(part, regions.part(groups), groups[0], logits))
    return mx.take(mx.concatenate(outputs, axis=1), mx.array(np.argsort(members)), axis=1)


def _attend_window(
    queries: mx.array, regions: Regions, group: HeadRows, scale: float, sinks: mx.array | None
) -> mx.array:
    """Attend causally to packed tokens, to the first full-precision tokens, and to the last ones before each query."""
    assert group.window is not None  # noqa: S101 - tells the type checker: the caller has looked
    length, before, outputs = queries.shape[2], regions.full_tokens - queries.shape[2], []
    size = max(group.window, LEAST_RUN)
    for start in range(0, length, size):
        queried = np.arange(before + start, before + min(start + size, length))  # full-precision tokens of the run
        near = max(group.sinks, int(queried[0]) - group.window + 1)
        seen = np.concatenate([np.arange(group.sinks), np.arange(near, queried[-1] + 1)])
        keys, values = (
            mx.concatenate([x[:, :, : group.sinks], x[:, :, near : int(queried[-1]) + 1]], axis=2)
            for x in (regions.full_keys, regions.full_values)
        )
        part = replace(regions, full_keys=keys, full_values=values, full_tokens=len(seen))
        visible = seen <= queried[:, None]
        visible &= (seen < group.sinks) | (seen > queried[:, None] - group.window)
        packed = np.ones((len(queried), regions.packed_tokens), bool)
        edge = regions.sink_tokens
        mask = mx.array(np.concatenate([visible[:, :edge], packed, visible[:, edge:]], axis=1))
        outputs.append(prefill(queries[:, :, start : start + size], part, scale=scale, mask=mask, sinks=sinks))
    return mx.concatenate(outputs, axis=2)
