"""Attention of a few queries over packed rows on a GPU: attend.metal and merge.metal, or attend_short.metal.

Rows of a batch that have buffers of their own attend in one call, eight at a time, or four whose keys are conditioned:
Metal passes a kernel 31 arrays.
"""

import struct
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import mlx.core as mx

from mlx_tq.codec.conditioning import MEAN_TOKENS, Conditioning
from mlx_tq.kernels import build, thresholds
from mlx_tq.kernels.constants import LEAST, check_can_run, codec_constants, filled, flips, layout_constants, table
from mlx_tq.kernels.masks import Mask, mask_bias
from mlx_tq.kernels.regions import Regions

# What each row of a batch has its own of.
OWN = ("packed_rows", "full_keys", "full_values")
MEANS = ("key_scale", "key_means", "mean_index")
ATTEND = build.Kernel(
    "attend",
    inputs=("queries", "key_flips", "mask_bias", "attend_sizes"),
    sources=OWN,
    outputs=("block_outputs", "block_maxima", "block_sums"),
)
CONDITIONED_ATTEND = ATTEND.with_more(sources=MEANS)
MERGE = build.Kernel(
    "merge",
    inputs=("block_outputs", "block_maxima", "block_sums", "value_flips", "sink_logits", "attend_sizes"),
    outputs=("attended",),
)
ATTEND_SHORT = build.Kernel(
    "attend_short", inputs=(*ATTEND.inputs, "value_flips", "sink_logits"), sources=OWN, outputs=("attended",)
)
CONDITIONED_SHORT = ATTEND_SHORT.with_more(sources=MEANS)
# Rows of a batch in one call, with plain and with conditioned keys.
TOGETHER, CONDITIONED_TOGETHER = 8, 4
# A kernel decodes a code once for this many query rows, as many as fit a lane's registers.
QUERIES = 4
# Simdgroups that share a short context, and keys up to this wide: their threadgroup memory fits Metal's 32 KB.
_SHARING, _WIDE = 8, 256


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
    conditioned = any(regions.conditioning is not None for regions in batch)
    run = partial(_together, conditioned=conditioned, scale=scale, mask=mask, sinks=sinks)
    if len(batch) == 1:
        return run(queries, batch, sources=1)
    together = CONDITIONED_TOGETHER if conditioned else TOGETHER
    starts = range(0, len(batch), together)
    parts = [(queries[i : i + together], batch[i : i + together]) for i in starts]
    return mx.concatenate([run(*part, sources=together) for part in parts])


def _together(
    queries: mx.array,
    batch: Sequence[Regions],
    *,
    sources: int,
    conditioned: bool,
    scale: float,
    mask: Mask,
    sinks: mx.array | None,
) -> mx.array:
    """One call for up to `sources` regions, in one kernel or in two, by the most tokens that a row has.

    It takes their keys for conditioned ones or for plain ones, so that all calls for a batch run one text.
    """
    rows, query_heads, length, dim = queries.shape
    heads = batch[0].full_keys.shape[1]
    layout, kind = batch[0].layout, batch[0].full_keys.dtype
    per_head = query_heads // heads * length
    taken = min(QUERIES, 1 << (per_head - 1).bit_length())
    tiles = rows * heads * -(-per_head // taken)
    short = max(regions.tokens for regions in batch) <= thresholds.current().short
    simdgroups = _SHARING if dim <= _WIDE else _SHARING // 2
    cuts = [_shared(regions, simdgroups) if short else _cut(regions, tiles) for regions in batch]
    most = max(blocks for _, blocks in cuts)
    bias = mask_bias(mask, batch[0].tokens)
    entries = [
        (r.prefix, r.body, r.beside, 0 if r.rows is None else r.rows.shape[2], r.full_keys.shape[2], *cut, most)
        for r, cut in zip(batch, cuts, strict=True)
    ]
    header = (query_heads, heads, length, isinstance(mask, str), *struct.unpack("i", struct.pack("f", scale)))
    times = rows // len(batch)
    sizes = [*header, *_steps(bias), *[number for entry in entries for number in entry] * times]
    own = [[_NO_ROWS if r.rows is None else r.rows, r.full_keys, r.full_values] for r in batch]
    if conditioned:
        means = [_means(regions) for regions in batch]
        own = [[*arrays, *m.arrays] for arrays, m in zip(own, means, strict=True)]
        sizes += [number for m in means for number in m.sizes] * times
    own += own[:1] * (sources - len(batch))  # stand for rows that are not there
    arrays_of_rows = [array for arrays in zip(*own, strict=True) for array in arrays]
    inputs = [queries, flips(layout.key.rotation), bias, table(sizes)]
    constants: build.Constants = (
        ("T", queries.dtype),
        ("SOURCES", sources),
        ("QUERIES", taken),
        ("MASKED", isinstance(mask, mx.array)),
        ("FULL_BITS", 8 * kind.size),
        ("FULL_WORD", kind if kind.size == 2 else mx.float16),
        ("CONDITIONED", conditioned),
        ("MEAN_TOKENS", MEAN_TOKENS),
        *layout_constants(layout),
    )
    shape = (rows, query_heads, length)
    ending = [flips(layout.value.rotation), _logits(sinks)]
    if short:
        (attended,) = build.run(
            CONDITIONED_SHORT if conditioned else ATTEND_SHORT,
            inputs=[*inputs, *ending, *arrays_of_rows],
            constants=(*constants, ("SINKS", sinks is not None), ("SIMDGROUPS", simdgroups)),
            grid=(32 * simdgroups, 1, tiles),
            threadgroup=(32 * simdgroups, 1, 1),
            output_shapes=[(*shape, layout.value.head_dim)],
            output_dtypes=[queries.dtype],
        )
        return attended
    outputs = build.run(
        CONDITIONED_ATTEND if conditioned else ATTEND,
        inputs=[*inputs, *arrays_of_rows],
        constants=constants,
        grid=(32, most, tiles),
        threadgroup=(32, 1, 1),
        output_shapes=[(*shape, most, layout.value.head_dim), (*shape, most), (*shape, most)],
        output_dtypes=[mx.float32] * 3,
    )
    merging = thresholds.current().merging
    (attended,) = build.run(
        MERGE,
        inputs=[*outputs, *ending, inputs[-1]],
        constants=(
            ("T", queries.dtype),
            ("SINKS", sinks is not None),
            ("SIMDGROUPS", merging),
            *codec_constants("VALUE", layout.value),
        ),
        grid=(32 * merging, rows * query_heads * length, 1),
        threadgroup=(32 * merging, 1, 1),
        output_shapes=[(*shape, layout.value.head_dim)],
        output_dtypes=[queries.dtype],
    )
    return attended


# Stand for the rows of an empty body, and for an index where tokens have none.
_NO_ROWS = mx.zeros((1, 1, 1, LEAST), mx.uint32)
_NO_INDEX = mx.zeros(LEAST, mx.int32)


class _Means(NamedTuple):
    """A row's own arrays of MEANS, and what `attend_sizes` says of them."""

    arrays: tuple[mx.array, mx.array, mx.array]
    sizes: tuple[int, int, bool]


def _means(regions: Regions) -> _Means:
    """Those of a row's conditioning; of plain keys, or none, weights that are 1 and means that are 0."""
    found, shape = regions.conditioning, regions.full_keys.shape
    if found is None:
        nothing = mx.zeros((*shape[:2], 1, shape[3]), mx.float16)
        found = Conditioning(mx.ones((*shape[:2], shape[3])), nothing, mx.zeros(regions.body, mx.int32))
    if found.index is None and found.first % 32:  # the kernel takes 32 tokens at once
        found = replace(found, index=found.which(regions.body))
    index = _NO_INDEX if found.index is None else filled(found.index)
    return _Means((found.scale, found.means, index), (found.means.shape[2], found.first, found.index is not None))


def _steps(bias: mx.array) -> tuple[int, int, int]:
    """How far apart a mask's numbers are from one batch row, query head and query to the next; 0 where there is one."""
    b, h, n, tokens = bias.shape
    return (b > 1) * h * n * tokens, (h > 1) * n * tokens, (n > 1) * tokens


def _logits(sinks: mx.array | None) -> mx.array:
    """Sinks for a kernel; any numbers where there are none."""
    if sinks is None:
        return table([], mx.float32)
    return filled(sinks.astype(mx.float32))


def _cut(regions: Regions, tiles: int) -> tuple[int, int]:
    """Blocks of packed tokens, and of all, that so many tiles of queries attend to."""
    cut = thresholds.current()
    packed, beside = (
        min(-(-tokens // cut.least_block), max(1, cut.simdgroups // tiles), cut.most_blocks)
        for tokens in (regions.body, regions.beside)
    )
    return packed, packed + beside


def _shared(regions: Regions, simdgroups: int) -> tuple[int, int]:
    """Simdgroups that take the packed tokens, in proportion, and all; the others take those in the model's type."""
    if not regions.body:
        return 0, simdgroups
    return min(max(round(simdgroups * regions.body / regions.tokens), 1), simdgroups - 1), simdgroups
