"""Attention of many queries: mlx's own kernel over the packed region of one layer, decoded in rotated space.

The inverse rotation is never applied to a cached token: full-precision keys and values are rotated instead, and the
output is rotated back once.
"""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import mlx.core as mx

from mlx_tq.codec.formats import Codec
from mlx_tq.codec.normalization import KeyNormalization, cast_clamped, decode_rotated_keys, normalize_queries
from mlx_tq.codec.rotation import rotate_exactly
from mlx_tq.kernels import arguments, backend
from mlx_tq.kernels.cpu.attend import launch_attend
from mlx_tq.kernels.execution_record import record
from mlx_tq.kernels.gpu import Kernel, fit_simdgroups
from mlx_tq.kernels.mlx_attention import attention, bounds
from mlx_tq.kernels.regions import Mask, Regions, take_columns
from mlx_tq.kernels.wht import wht

DEQUANTIZE = Kernel(
    "dequantize",
    inputs=("packed_rows", "full_keys", "full_values", "key_flips", "value_flips", "dequantize_sizes"),
    outputs=("keys_out", "values_out"),
    normalized=("key_scale", "key_means", "mean_index"),
)
THREADS = 256
BLOCK_TOKENS = 256  # packed tokens that the reference implementation decodes at a time


def _launch_dequantize(regions: Regions) -> tuple[mx.array, mx.array]:
    rows, layout, normalization = regions.rows(), regions.layout, regions.normalization
    batch, heads, tokens, _ = rows.shape
    dtype, length = regions.full_keys.dtype, regions.full_tokens
    arguments.check_can_run(layout, dtype)
    decoding_threads = _round_up(
        max(arguments.count_units(layout.key), arguments.count_units(layout.value)) * batch * heads * tokens
    )
    # Without full-precision tokens the kernel reads neither array, but arrays must not be empty.
    full = (regions.keys, regions.values) if length else (mx.zeros((1, 1, 1, arguments.MIN_SIZE), dtype),) * 2
    run = partial(
        DEQUANTIZE.run,
        inputs=[
            rows.view(mx.uint16),
            *full,
            arguments.sign_flips(layout.key.rotation),
            arguments.sign_flips(layout.value.rotation),
            arguments.small_input([length, decoding_threads]),
            *arguments.key_groups(layout.key, batch, heads),
            *arguments.normalization_inputs(normalization, tokens),
            *arguments.trellis_levels(layout.key, layout.value),
        ],
        constants=(
            ("T", dtype),
            *arguments.normalization_constants(normalization, dtype),
            *arguments.layout_constants(layout),
        ),
        grid=(decoding_threads + _round_up(32 * batch * heads * length), 2, 1),
        output_shapes=[(batch, heads, tokens + length, codec.head_dim) for codec in (layout.key, layout.value)],
        output_dtypes=[dtype, dtype],
    )
    keys, values = fit_simdgroups(THREADS // 32, lambda simdgroups: run(threadgroup=(32 * simdgroups, 1, 1)))
    return keys, values


def _round_up(threads: int) -> int:
    return -(-threads // THREADS) * THREADS


@backend.dispatch(_launch_dequantize)
def dequantize(regions: Regions) -> tuple[mx.array, mx.array]:
    """Decode the packed region into rotated space, and append the rotated keys and values of sinks and window.

    Keys [B, H, S, Dk] and values [B, H, S, Dv] are in the model's dtype. If keys are normalized, packed ones include
    their mean and the others are multiplied by the scale.
    """
    layout, dtype = regions.layout, regions.full_keys.dtype
    keys, values = [], []
    edges = [*range(0, regions.packed_tokens, BLOCK_TOKENS), regions.packed_tokens]
    for start, stop in pairwise(edges):  # frees the fp32 arrays of a block before the next one
        rows, normalization = regions.rows(start, stop), regions.normalization and regions.normalization.after(start)
        keys.append(
            cast_clamped(decode_rotated_keys(layout.key, layout.keys(rows), normalization), dtype, normalization)
        )
        values.append(layout.value.decode_rotated(layout.values(rows)).astype(dtype))
    keys.append(_rotate(regions.keys, layout.key, regions.normalization))
    values.append(_rotate(regions.values, layout.value, None))
    return mx.concatenate(keys, axis=2), mx.concatenate(values, axis=2)


def _rotate(x: mx.array, codec: Codec, normalization: KeyNormalization | None) -> mx.array:
    y = x.astype(mx.float32)
    if normalization is not None:
        y = y * normalization.scale[:, :, None]
    return cast_clamped(rotate_exactly(y, codec.rotation), x.dtype, normalization)


@backend.dispatch(cpu=launch_attend)
def prefill(
    queries: mx.array, regions: Regions, *, scale: float, mask: Mask = None, sinks: mx.array | None = None
) -> mx.array:
    """Attend to a cache, with or without packed tokens; arguments and result are those of `attend`, for any L.

    Where all decoded keys and values would exceed `bounds().decoded`, those of one KV head are decoded at a time.
    """
    record("mlx attention")
    if regions.packed_tokens == 0:
        return attention(queries, regions.keys, regions.values, scale=scale, mask=mask, sinks=sinks)
    if isinstance(mask, mx.array):  # packed tokens come first in what `dequantize` returns
        start, stop = regions.sink_tokens, regions.sink_tokens + regions.packed_tokens
        mask = take_columns(mask, (start, stop), (0, start), (stop, regions.tokens))
    if regions.full_nbytes <= bounds().decoded:
        return _attend_decoded(queries, regions, scale, mask, sinks)
    heads = regions.full_keys.shape[1]
    groups = queries.shape[1] // heads
    outputs: list[mx.array] = []
    for head in range(heads):
        members = slice(head * groups, (head + 1) * groups)
        # One after another: mlx would otherwise decode all heads before it attends to one.
        part = regions.head(head)
        head_queries, rows = mx.depends([queries[:, members], part.rows()], outputs[-1:])
        part = replace(part, packed_rows=rows, shared=())
        head_sinks = None if sinks is None else sinks[members]
        outputs.append(_attend_decoded(head_queries, part, scale, _take_heads(mask, members), head_sinks))
    return mx.concatenate(outputs, axis=1)


def _take_heads(mask: Mask, heads: slice) -> Mask:
    """Return a mask for some query heads, for all of which it may be the same."""
    if isinstance(mask, mx.array) and mask.ndim > 2 and mask.shape[-3] > 1:
        return mask[..., heads, :, :]
    return mask


def _attend_decoded(queries: mx.array, regions: Regions, scale: float, mask: Mask, sinks: mx.array | None) -> mx.array:
    layout, normalization = regions.layout, regions.normalization
    if layout.key.rotation is None:
        rotated = cast_clamped(normalize_queries(queries, normalization), queries.dtype, normalization)
    else:
        rotated = wht(queries, layout.key.rotation, normalization=normalization)
    out = attention(rotated, *dequantize(regions), scale=scale, mask=mask, sinks=sinks)
    return out if layout.value.rotation is None else wht(out, layout.value.rotation, inverse=True)
