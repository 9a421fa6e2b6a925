"""Attention of a few queries over a compressed cache, without dequantizing its rows.

<R k, R q> = <k, q>: queries are rotated once and scored against packed rows, values are accumulated in rotated space,
and the output is rotated back once. Sinks and window attend unrotated. Partial results merge exactly (log-sum-exp).
"""

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from typing import NamedTuple

import mlx.core as mx

from mlx_tq.codec.normalization import normalize_queries, score_means
from mlx_tq.codec.rotation import rotate, rotate_back
from mlx_tq.kernels import backend
from mlx_tq.kernels.attend_gpu import launch_attend, launch_attend_batch
from mlx_tq.kernels.cpu import attend as cpu_attend
from mlx_tq.kernels.cpu_streams import split_tokens
from mlx_tq.kernels.prefill import prefill
from mlx_tq.kernels.regions import Mask, Regions, apply_mask, take_columns
from mlx_tq.kernels.shared_prefixes import find_shared_prefixes

# Packed tokens decoded at a time: with 8 heads of 128 they take 32 MiB in fp32.
BLOCK_TOKENS = 4096


@backend.dispatch(launch_attend, cpu_attend.launch_attend)
def attend(
    queries: mx.array, regions: Regions, *, scale: float, mask: Mask = None, sinks: mx.array | None = None
) -> mx.array:
    """Attend to a cache with queries [B, Hq, L, Dk] of its last L tokens, L small: [B, Hq, L, Dv] in their dtype.

    `scale` is the factor of scores, and `sinks` are attention-sink logits [Hq].
    """
    return _attend(queries, regions, scale, mask, sinks)


def _attend(
    queries: mx.array,
    regions: Regions,
    scale: float,
    mask: Mask,
    sinks: mx.array | None,
    prefix_partial: "Partial | None" = None,
    start: int = 0,
) -> mx.array:
    """Attend to a cache.

    `prefix_partial` is the partial attention to its packed tokens before `start`, in rotated space.
    """
    query_heads, length = queries.shape[1:3]
    heads, full_tokens = regions.full_keys.shape[1], regions.full_tokens
    q = _group_queries(queries, heads, scale)

    scores = q @ regions.keys.astype(mx.float32).swapaxes(-1, -2)
    if isinstance(mask, mx.array):
        packed_stop = regions.sink_tokens + regions.packed_tokens
        scores = apply_mask(scores, take_columns(mask, (0, regions.sink_tokens), (packed_stop, regions.tokens)), length)
    elif mask == "causal" and length > 1:
        visible = mx.arange(full_tokens)[None] <= mx.arange(full_tokens - length, full_tokens)[:, None]
        scores = apply_mask(scores, visible, length)
    result = attend_scores(scores, [regions.values.astype(mx.float32)])
    if sinks is not None:  # a sink logit is the score of a key with value zero
        logits = mx.repeat(sinks.astype(mx.float32).reshape(1, heads, -1), length, axis=-1)[..., None]
        logits = mx.broadcast_to(logits, result.m.shape)
        result = merge(result, Partial(logits, mx.ones_like(logits), mx.zeros_like(result.o)))

    parts = [] if prefix_partial is None else [prefix_partial]
    if start < regions.packed_tokens:
        parts.append(_attend_packed(q, regions, start, regions.packed_tokens, mask, length))
    if parts:
        packed = reduce(merge, parts)
        result = merge(result, packed._replace(o=rotate_back(packed.o, regions.layout.value.rotation)))
    return (result.o / result.l).reshape(-1, query_heads, length, result.o.shape[-1]).astype(queries.dtype)


def _group_queries(queries: mx.array, heads: int, scale: float) -> mx.array:
    """Return scaled queries by KV head, fp32 [B, H, G L, Dk]."""
    return (queries.astype(mx.float32) * scale).reshape(queries.shape[0], heads, -1, queries.shape[3])


def _attend_packed(q: mx.array, regions: Regions, start: int, stop: int, mask: Mask, length: int) -> "Partial":
    """Attend to packed tokens [start, stop), in rotated space."""
    q = rotate(normalize_queries(q, regions.normalization), regions.layout.key.rotation)
    parts = []
    for stream, begin, end in split_tokens(stop - start):
        with mx.stream(stream):  # in blocks, so that memory stays bounded
            blocks = pairwise([*range(start + begin, start + end, BLOCK_TOKENS), start + end])
            parts.append(reduce(merge, (_attend_block(*block, q, regions, mask, length) for block in blocks)))
    return reduce(merge, parts)


def _attend_block(start: int, stop: int, q: mx.array, regions: Regions, mask: Mask, length: int) -> "Partial":
    rows, layout = regions.rows(start, stop), regions.layout
    scores = layout.key.scores(q, layout.keys(rows))
    if regions.normalization is not None:
        scores = scores + score_means(q, regions.normalization.after(start), stop - start)
    if isinstance(mask, mx.array):  # causal queries see all packed tokens
        columns = take_columns(mask, (regions.sink_tokens + start, regions.sink_tokens + stop))
        scores = apply_mask(scores, columns, length)
    codes, value_scale = layout.values(rows)
    gain = None if value_scale is None else layout.value.gain(value_scale)
    return attend_scores(scores, layout.value.decode_planes(codes), gain)


@backend.dispatch(launch_attend_batch, cpu_attend.launch_attend_batch)
def attend_batch(
    queries: mx.array, batch: Sequence[Regions], *, scale: float, mask: Mask = None, sinks: mx.array | None = None
) -> mx.array:
    """Return what `attend` returns for each of B caches of batch size 1 whose layouts are like; `mask` is no array."""
    prefix_partials: dict[int, tuple[Partial, int]] = {}
    for members, tokens in find_shared_prefixes(batch):
        parts = _attend_prefix(mx.take(queries, mx.array(members), axis=0), batch[members[0]], tokens, scale)
        prefix_partials.update((member, (part, tokens)) for member, part in zip(members, parts, strict=True))
    outputs = []
    for i, regions in enumerate(batch):
        row = queries[i : i + 1]
        if regions.packed_tokens:
            outputs.append(_attend(row, regions, scale, mask, sinks, *prefix_partials.get(i, ())))
        else:
            outputs.append(prefill(row, regions, scale=scale, mask=mask, sinks=sinks))
    return mx.concatenate(outputs)


def _attend_prefix(queries: mx.array, regions: Regions, tokens: int, scale: float) -> list["Partial"]:
    """Attend with the queries [N, Hq, L, Dk] of N caches to the packed tokens that they begin with."""
    heads, count = regions.full_keys.shape[1], queries.shape[0]
    folded = _group_queries(queries, heads, scale).swapaxes(0, 1).reshape(1, heads, -1, queries.shape[3])
    together = _attend_packed(folded, regions, 0, tokens, None, queries.shape[2])
    rows = folded.shape[2] // count
    return [Partial(*(x[:, :, i * rows : (i + 1) * rows] for x in together)) for i in range(count)]


class Partial(NamedTuple):
    """Unnormalized attention over some keys, in fp32."""

    m: mx.array  # largest score, [..., 1]
    l: mx.array  # noqa: E741  sum of exp(score - m), [..., 1]
    o: mx.array  # sum of exp(score - m) value, [..., Dv]


def merge(a: Partial, b: Partial) -> Partial:
    m = mx.maximum(a.m, b.m)
    weight_a, weight_b = mx.exp(a.m - m), mx.exp(b.m - m)
    return Partial(m, a.l * weight_a + b.l * weight_b, a.o * weight_a + b.o * weight_b)


def attend_scores(scores: mx.array, values: list[mx.array], gain: mx.array | None = None) -> Partial:
    """Attend with masked scores fp32 [..., N, S] to planes of values [..., S, Dv / planes] times `gain` [..., S]."""
    m = scores.max(axis=-1, keepdims=True)
    p = mx.exp(scores - m)
    total = p.sum(axis=-1, keepdims=True)
    if gain is not None:
        p = p * gain[..., None, :]
    return Partial(m, total, mx.concatenate([p @ plane for plane in values], axis=-1))
