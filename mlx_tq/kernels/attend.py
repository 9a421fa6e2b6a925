"""Attention of a few queries over a compressed cache, with nothing dequantised per query.

<R k, R q> = <k, q>: the queries are rotated once, scored against packed rows, values are accumulated in rotated space
and the output is rotated back once. Tokens in the model's own type attend unrotated; the parts merge exactly. Packed
rows are taken in blocks, so that memory stays bounded.
"""

from functools import partial as bound
from functools import reduce
from itertools import pairwise

import mlx.core as mx

from mlx_tq.codec.rotation import rotated, rotated_back
from mlx_tq.codec.rows import RowLayout
from mlx_tq.kernels import build, impl, phases
from mlx_tq.kernels.constants import LEAST, check_can_run, codec_constants, flips, layout_constants, table
from mlx_tq.kernels.lanes import Stream, lanes
from mlx_tq.kernels.masks import (
    Mask,
    apply_mask,
    causal_columns,
    mask_bias,
    restrict,
    take_columns,
    visible_ranges,
)
from mlx_tq.kernels.softmax import Partial, merge, partial

# Packed tokens decoded at a time: at 8 heads of 128 this is 32 MiB of fp32 scratch.
BLOCK_TOKENS = 4096


def attend(
    queries: mx.array,
    rows: mx.array,
    body: int,
    layout: RowLayout,
    keys: mx.array,
    values: mx.array,
    *,
    prefix: int,
    scale: float,
    mask: Mask = None,
    sinks: mx.array | None = None,
    visible: mx.array | None = None,
) -> mx.array:
    """Attend to `prefix | body | tail`.

    Args:
        queries: [B, Hq, L, Dk], L small; the last L tokens of the tail are theirs.
        rows: packed body, uint32 [B, H, capacity, W]; what lies past `body` is never read.
        body: tokens in the body.
        layout: of the rows.
        keys: prefix and tail in the model's type, [B, H, T, Dk].
        values: theirs, [B, H, T, Dv].
        prefix: how many of the T come before the body.
        scale: of the scores.
        mask: see `masks`.
        sinks: attention-sink logits, [Hq].
        visible: int32 [B, L, 2], the range of tokens [first, last) in logical order that each query of a batch row sees
            at most: a sliding window, padding on the left. A query that sees nothing returns any finite value.

    Returns:
        [B, Hq, L, Dv] in the queries' type.
    """
    return impl.call(
        _attend_gpu,
        attend_ref,
        queries,
        rows,
        body,
        layout,
        keys,
        values,
        check=bound(check_can_run, layout, queries.dtype, keys.dtype),
        prefix=prefix,
        scale=scale,
        mask=mask,
        sinks=sinks,
        visible=visible,
    )


def attend_ref(
    queries: mx.array,
    rows: mx.array,
    body: int,
    layout: RowLayout,
    keys: mx.array,
    values: mx.array,
    *,
    prefix: int,
    scale: float,
    mask: Mask = None,
    sinks: mx.array | None = None,
    visible: mx.array | None = None,
) -> mx.array:
    """`attend` in mlx's own operations."""
    batch, query_heads, length, dim = queries.shape
    heads, tokens = keys.shape[1:3]
    if visible is not None:
        mask = restrict(mask, visible, tokens + body)
    q = (queries.astype(mx.float32) * scale).reshape(batch, heads, -1, dim)  # [B, H, G L, Dk]

    scores = q @ keys.astype(mx.float32).swapaxes(-1, -2)
    if isinstance(mask, mx.array):
        columns = take_columns(mask, (0, prefix), (prefix + body, tokens + body))
        scores = apply_mask(scores, columns, length)
    elif mask == "causal" and length > 1:
        scores = apply_mask(scores, causal_columns(length, tokens), length)
    result = partial(scores, [values.astype(mx.float32)])
    if sinks is not None:
        result = merge(result, _sink(sinks, result, heads, length))

    if body:
        turned = rotated(q, layout.key.rotation)
        packed = reduce(merge, [_attend_run(*run, turned, rows, layout, mask, prefix, length) for run in lanes(body)])
        result = merge(result, packed._replace(o=rotated_back(packed.o, layout.value.rotation)))
    out = result.o / result.l
    return out.reshape(batch, query_heads, length, -1).astype(queries.dtype)


def _columns(mask: Mask, prefix: int, start: int, stop: int) -> mx.array | None:
    """The part of a mask for positions [start, stop) of the body; causal queries see all of it."""
    return take_columns(mask, (prefix + start, prefix + stop)) if isinstance(mask, mx.array) else None


def _attend_run(
    stream: Stream,
    start: int,
    stop: int,
    q: mx.array,
    rows: mx.array,
    layout: RowLayout,
    mask: Mask,
    prefix: int,
    length: int,
) -> Partial:
    """A run of packed tokens, in blocks, on a stream."""
    edges = [*range(start, stop, BLOCK_TOKENS), stop]
    with mx.stream(stream):
        return reduce(
            merge,
            (
                _attend_block(q, rows[:, :, first:last], layout, _columns(mask, prefix, first, last), length)
                for first, last in pairwise(edges)
            ),
        )


def _attend_block(q: mx.array, block: mx.array, layout: RowLayout, mask: mx.array | None, length: int) -> Partial:
    scores = layout.key.scores(q, layout.keys(block))
    if mask is not None:
        scores = apply_mask(scores, mask, length)
    codes, scale = layout.values(block)
    gain = None if scale is None else layout.value.gain(scale)
    return partial(scores, layout.value.planes(codes), gain)


def _sink(sinks: mx.array, like: Partial, heads: int, length: int) -> Partial:
    """A key of given score and zero value."""
    score = mx.repeat(sinks.astype(mx.float32).reshape(1, heads, -1), length, axis=-1)[..., None]
    score = mx.broadcast_to(score, like.m.shape)
    return Partial(score, mx.ones_like(score), mx.zeros_like(like.o))


ATTEND = build.Kernel(
    "attend",
    inputs=(
        "queries",
        "key_flips",
        "packed_rows",
        "row_pairs",
        "full_keys",
        "full_values",
        "visible_ranges",
        "mask_bias",
        "score_scale",
        "attend_sizes",
    ),
    outputs=("block_outputs", "block_maxima", "block_sums"),
)
MERGE = build.Kernel(
    "merge",
    inputs=("block_outputs", "block_maxima", "block_sums", "value_flips", "sink_logits", "merge_sizes"),
    outputs=("attended",),
)
ATTEND_SHORT = build.Kernel(
    "attend_short",
    inputs=(*ATTEND.inputs, "value_flips", "sink_logits"),
    outputs=("attended",),
)
# A kernel decodes a code once for this many query rows, as many as fit a lane's registers.
QUERIES = 4


def _attend_gpu(
    queries: mx.array,
    rows: mx.array,
    body: int,
    layout: RowLayout,
    keys: mx.array,
    values: mx.array,
    *,
    prefix: int,
    scale: float,
    mask: Mask = None,
    sinks: mx.array | None = None,
    visible: mx.array | None = None,
) -> mx.array:
    """`attend` in one kernel or in two, by the number of tokens.

    The last axis of `rows`, `keys` and `values` must be contiguous.

    Raises:
        KernelUnavailableError: there is no GPU, its compiler refuses the kernel, or kernels do not have the format,
            rotation, head size or type; `attend_ref` does.

    """
    check_can_run(layout, queries.dtype, keys.dtype)
    batch, query_heads, length, _ = queries.shape
    heads, tokens = keys.shape[1:3]
    per_head = query_heads // heads * length
    taken = min(QUERIES, 1 << (per_head - 1).bit_length())
    tiles = batch * heads * -(-per_head // taken)
    short = tokens + body <= phases.current().short
    simdgroups = _SHARING if layout.key.head_dim <= _WIDE else _SHARING // 2
    packed_blocks = _share(body, tokens, simdgroups) if short else _blocks(body, tiles)
    inputs = [
        queries,
        flips(layout.key.rotation),
        rows.view(mx.uint16),
        rows,
        keys.view(mx.uint16),
        values.view(mx.uint16),
        visible_ranges(mask, visible, batch, length, tokens + body),
        mask_bias(mask, (batch, query_heads, length, tokens + body)),
        table([scale], mx.float32),
        table([prefix, body, packed_blocks]),
    ]
    constants: build.Constants = (
        ("T", queries.dtype),
        ("QUERIES", taken),
        ("MASKED", isinstance(mask, mx.array)),
        ("FULL_BITS", 8 * keys.dtype.size),
        ("FULL_WORD", keys.dtype if keys.dtype.size == 2 else mx.float16),
        *layout_constants(layout),
    )
    if not short:
        blocks = packed_blocks + _blocks(tokens, tiles)
        return _attend_in_two(inputs, constants, layout, sinks, (packed_blocks, blocks), tiles)
    (attended,) = build.run(
        ATTEND_SHORT,
        inputs=[*inputs, flips(layout.value.rotation), _logits(sinks)],
        constants=(*constants, ("SINKS", sinks is not None), ("SIMDGROUPS", simdgroups)),
        grid=(32 * simdgroups, 1, tiles),
        threadgroup=(32 * simdgroups, 1, 1),
        output_shapes=[(batch, query_heads, length, layout.value.head_dim)],
        output_dtypes=[queries.dtype],
    )
    return attended


def _attend_in_two(
    inputs: list[mx.array],
    constants: build.Constants,
    layout: RowLayout,
    sinks: mx.array | None,
    cut: tuple[int, int],
    tiles: int,
) -> mx.array:
    """Blocks side by side, of which `cut` are packed and all, and their merge."""
    queries, (packed_blocks, blocks) = inputs[0], cut
    batch, query_heads, length, _ = queries.shape
    partial_shape = (batch, query_heads, length, blocks)
    outputs, maxima, sums = build.run(
        ATTEND,
        inputs=inputs,
        constants=constants,
        grid=(32, blocks, tiles),
        threadgroup=(32, 1, 1),
        output_shapes=[(*partial_shape, layout.value.head_dim), partial_shape, partial_shape],
        output_dtypes=[mx.float32] * 3,
    )
    merging = phases.current().merging
    sizes = table([packed_blocks, blocks, query_heads, length])
    (attended,) = build.run(
        MERGE,
        inputs=[outputs, maxima, sums, flips(layout.value.rotation), _logits(sinks), sizes],
        constants=(
            ("T", queries.dtype),
            ("SINKS", sinks is not None),
            ("SIMDGROUPS", merging),
            *codec_constants("VALUE", layout.value),
        ),
        grid=(32 * merging, batch * query_heads * length, 1),
        threadgroup=(32 * merging, 1, 1),
        output_shapes=[(batch, query_heads, length, layout.value.head_dim)],
        output_dtypes=[queries.dtype],
    )
    return attended


def _logits(sinks: mx.array | None) -> mx.array:
    """Sinks for a kernel; any numbers where there are none."""
    if sinks is None:
        return table([], mx.float32)
    return mx.pad(sinks.astype(mx.float32), (0, max(0, LEAST - sinks.size)))


def _blocks(tokens: int, tiles: int) -> int:
    """Into how many blocks tokens are cut that so many simdgroups each attend to."""
    cut = phases.current()
    return min(-(-tokens // cut.least_block), max(1, cut.simdgroups // tiles), cut.most_blocks)


# Simdgroups that share a short context, and keys up to this wide: their threadgroup memory fits Metal's 32 KB.
_SHARING, _WIDE = 8, 256


def _share(body: int, tokens: int, simdgroups: int) -> int:
    """How many simdgroups take the packed tokens, in proportion; the others take those in the model's type."""
    return min(max(round(simdgroups * body / (body + tokens)), 1), simdgroups - 1) if body else 0
