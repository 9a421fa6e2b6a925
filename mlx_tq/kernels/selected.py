"""Attention to some of the packed rows of a cache: those that an index lists, or other ones for each KV head."""

from dataclasses import replace

import mlx.core as mx

from mlx_tq.kernels import backend
from mlx_tq.kernels.cpu.attend import launch_attend_selected
from mlx_tq.kernels.regions import MASKED, Regions, Selection


@backend.dispatch(cpu=launch_attend_selected)
def attend_selected(
    queries: mx.array, regions: Regions, selection: Selection, *, scale: float
) -> tuple[mx.array, mx.array]:
    """Attend to sinks, window and the selected rows of a cache of batch size 1: no query's own token is packed.

    Queries are [1, Hq, L, Dk]. The output is [1, Hq, L, Dv] in their dtype, the log-sum-exp of scores fp32 [1, Hq, L].
    """
    selection.check(regions.packed_tokens)
    if selection.index is not None:
        rows, normalization = mx.take(regions.rows(), selection.index, axis=2), regions.normalization
        if normalization is not None:
            index = normalization.mean_index(regions.packed_tokens)[selection.index]
            normalization = replace(normalization, index=index)
        regions = replace(
            regions, packed_rows=rows, packed_tokens=rows.shape[2], shared=(), normalization=normalization
        )
    full_keys, full_values = (x.astype(mx.float32) for x in (regions.full_keys, regions.full_values))
    keys, values = replace(regions, full_keys=full_keys, full_values=full_values).decode()
    heads, length = keys.shape[1], queries.shape[2]
    q = (queries.astype(mx.float32) * scale).reshape(heads, -1, queries.shape[3])
    scores = (q @ keys[0].swapaxes(-1, -2)).reshape(heads, -1, length, regions.tokens)
    visible = mx.arange(regions.tokens) <= mx.arange(regions.tokens - length, regions.tokens)[:, None]
    if selection.ranges is not None:
        first, count = selection.ranges[:, :1], selection.ranges[:, 1:]
        row = mx.arange(regions.tokens)[None] - regions.sink_tokens
        is_packed = (row >= 0) & (row < regions.packed_tokens)
        visible = visible & (~is_packed | ((row >= first) & (row < first + count)))[:, None, None]
    scores = mx.where(visible, scores, MASKED)
    output = mx.softmax(scores, axis=-1).reshape(heads, -1, regions.tokens) @ values[0]
    log_sums = mx.logsumexp(scores, axis=-1)
    return output.reshape(*queries.shape[:3], -1).astype(queries.dtype), log_sums.reshape(queries.shape[:3])
