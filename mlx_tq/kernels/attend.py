"""Attention of a few queries over a compressed cache, with nothing dequantised per query.

<R k, R q> = <k, q>: the queries are rotated once, scored against packed rows, values are accumulated in rotated space
and the output is rotated back once. Tokens in the model's own type attend unrotated; the parts merge exactly. Packed
rows are taken in blocks, so that memory stays bounded.
"""

from collections.abc import Sequence
from functools import partial as bound
from functools import reduce
from itertools import pairwise
from typing import Any

import mlx.core as mx

from mlx_tq.codec.normalization import KeyNormalization, normalize_queries, score_means
from mlx_tq.codec.rotation import rotate, rotate_back
from mlx_tq.codec.rows import RowLayout
from mlx_tq.kernels import backend
from mlx_tq.kernels.attend_together import attend_gpu
from mlx_tq.kernels.constants import check_can_run
from mlx_tq.kernels.cpu_streams import Stream, runs
from mlx_tq.kernels.masks import Mask, apply_mask, causal_columns, take_columns
from mlx_tq.kernels.prefill import prefill
from mlx_tq.kernels.regions import Regions
from mlx_tq.kernels.softmax import Partial, merge, partial

# Packed tokens decoded at a time: at 8 heads of 128 this is 32 MiB of fp32 scratch.
BLOCK_TOKENS = 4096


def attend(
    queries: mx.array,
    regions: Regions,
    *,
    scale: float,
    mask: Mask = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attend to packed rows and to what lies beside them.

    Args:
        queries: [B, Hq, L, Dk], L small; the last L tokens of the tail are theirs.
        regions: what they attend to, with rows.
        scale: of the scores.
        mask: see `masks`.
        sinks: attention-sink logits, [Hq].

    Returns:
        [B, Hq, L, Dv] in the queries' type.
    """
    check = bound(check_can_run, regions.layout, queries.dtype, regions.full_keys.dtype)
    return backend.call(_attend_gpu, attend_ref, queries, regions, check=check, scale=scale, mask=mask, sinks=sinks)


def attend_batch(
    queries: mx.array,
    batch: Sequence[Regions],
    *,
    scale: float,
    mask: str | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """`attend` for a batch whose rows have buffers and lengths of their own: on a GPU in one call for eight rows.

    Args:
        queries: [B, Hq, L, Dk], as of `attend`.
        batch: B regions of one layout and batch size 1.
        scale: of the scores.
        mask: None or "causal".
        sinks: attention-sink logits, [Hq].

    Returns:
        [B, Hq, L, Dv] in the queries' type: of each row what it would have been alone.
    """
    check = bound(check_can_run, batch[0].layout, queries.dtype, batch[0].full_keys.dtype)
    return backend.call(attend_gpu, _attend_batch_ref, queries, batch, check=check, scale=scale, mask=mask, sinks=sinks)


def _attend_batch_ref(queries: mx.array, batch: Sequence[Regions], **options: Any) -> mx.array:
    runs = [attend_ref if regions.body else prefill for regions in batch]
    return mx.concatenate([run(queries[i : i + 1], batch[i], **options) for i, run in enumerate(runs)])


def attend_ref(
    queries: mx.array,
    regions: Regions,
    *,
    scale: float,
    mask: Mask = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """`attend` in mlx's own operations."""
    batch, query_heads, length, dim = queries.shape
    keys, values, sink_tokens, body = regions.keys, regions.values, regions.sink_tokens, regions.body
    heads, tokens = keys.shape[1:3]
    q = (queries.astype(mx.float32) * scale).reshape(batch, heads, -1, dim)  # [B, H, G L, Dk]

    scores = q @ keys.astype(mx.float32).swapaxes(-1, -2)
    if isinstance(mask, mx.array):
        columns = take_columns(mask, (0, sink_tokens), (sink_tokens + body, regions.tokens))
        scores = apply_mask(scores, columns, length)
    elif mask == "causal" and length > 1:
        scores = apply_mask(scores, causal_columns(length, tokens), length)
    result = partial(scores, [values.astype(mx.float32)])
    if sinks is not None:
        result = merge(result, _sink(sinks, result, heads, length))

    if body:
        turned = rotate(normalize_queries(q, regions.normalization), regions.layout.key.rotation)
        packed = reduce(merge, [_attend_run(*run, turned, regions, mask, length) for run in runs(body)])
        result = merge(result, packed._replace(o=rotate_back(packed.o, regions.layout.value.rotation)))
    out = result.o / result.l
    return out.reshape(batch, query_heads, length, -1).astype(queries.dtype)


def _columns(mask: Mask, sink_tokens: int, start: int, stop: int) -> mx.array | None:
    """The part of a mask for positions [start, stop) of the body; causal queries see all of it."""
    return take_columns(mask, (sink_tokens + start, sink_tokens + stop)) if isinstance(mask, mx.array) else None


def _attend_run(
    stream: Stream,
    start: int,
    stop: int,
    q: mx.array,
    regions: Regions,
    mask: Mask,
    length: int,
) -> Partial:
    """A run of packed tokens, in blocks, on a stream."""
    edges = [*range(start, stop, BLOCK_TOKENS), stop]
    with mx.stream(stream):
        return reduce(
            merge,
            (
                _attend_block(
                    q,
                    regions.between(first, last),
                    regions.layout,
                    regions.normalization and regions.normalization.after(first),
                    _columns(mask, regions.sink_tokens, first, last),
                    length,
                )
                for first, last in pairwise(edges)
            ),
        )


def _attend_block(
    q: mx.array,
    block: mx.array,
    layout: RowLayout,
    normalization: KeyNormalization | None,
    mask: mx.array | None,
    length: int,
) -> Partial:
    scores = layout.key.scores(q, layout.keys(block))
    if normalization is not None:
        scores = scores + score_means(q, normalization, block.shape[2])
    if mask is not None:
        scores = apply_mask(scores, mask, length)
    codes, scale = layout.values(block)
    gain = None if scale is None else layout.value.gain(scale)
    return partial(scores, layout.value.decode_planes(codes), gain)


def _sink(sinks: mx.array, like: Partial, heads: int, length: int) -> Partial:
    """A key of given score and zero value."""
    score = mx.repeat(sinks.astype(mx.float32).reshape(1, heads, -1), length, axis=-1)[..., None]
    score = mx.broadcast_to(score, like.m.shape)
    return Partial(score, mx.ones_like(score), mx.zeros_like(like.o))


def _attend_gpu(queries: mx.array, regions: Regions, **options: Any) -> mx.array:
    return attend_gpu(queries, [regions], **options)
