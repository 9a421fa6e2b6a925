"""Attention of a few queries over packed rows on a GPU: attend.metal and merge.metal, or attend_short.metal.

Rows of a batch that have buffers of their own attend in one call, as many at a time as Metal passes a kernel arrays:
eight, or four whose keys are normalized, and one less of each where codes are of a trellis.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import mlx.core as mx

from mlx_tq.codec.normalization import MEAN_TOKENS, KeyNormalization
from mlx_tq.codec.rows import RowLayout
from mlx_tq.kernels import build, thresholds
from mlx_tq.kernels.constants import (
    LEAST,
    codec_constants,
    filled,
    flips,
    has_trellis,
    layout_constants,
    table,
    with_levels,
)
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
NORMALIZED_ATTEND = ATTEND.with_more(sources=MEANS)
MERGE = build.Kernel(
    "merge",
    inputs=("block_outputs", "block_maxima", "block_sums", "value_flips", "sink_logits", "attend_sizes"),
    outputs=("attended",),
)
ATTEND_SHORT = build.Kernel(
    "attend_short", inputs=(*ATTEND.inputs, "value_flips", "sink_logits"), sources=OWN, outputs=("attended",)
)
NORMALIZED_SHORT = ATTEND_SHORT.with_more(sources=MEANS)
_ARRAYS = 31  # that Metal passes a kernel
# A kernel decodes a code once for this many query rows, as many as fit a lane's registers.
QUERIES = 4
# Simdgroups that share a short context, and keys up to this wide: their threadgroup memory fits Metal's 32 KB.
_SHARING, _WIDE = 8, 256


class _Arguments(NamedTuple):
    """Of a call: inputs of all rows, those of each, constants, and `attend_sizes`."""

    inputs: list[mx.array]
    arrays: list[mx.array]
    constants: build.Constants
    sizes: list[int]


class Blocks(NamedTuple):
    """What the first pass finds for queries [B, Hq, L, Dk], block by block; see attend.metal.

    Attributes:
        outputs: fp32 [B, Hq, L, most, Dv].
        maxima, sums: fp32 [B, Hq, L, most].
        sizes: heads, lengths and cuts, for both passes.
        cuts: of each region its blocks of packed tokens, and all that it has of `most`.
    """

    outputs: mx.array
    maxima: mx.array
    sums: mx.array
    sizes: list[int]
    cuts: list[tuple[int, int]]


def most_together(layout: RowLayout, *, normalized: bool) -> int:
    """Rows of a batch in one call."""
    kernels = (NORMALIZED_ATTEND, NORMALIZED_SHORT) if normalized else (ATTEND, ATTEND_SHORT)
    shared = max(len(kernel.inputs) + len(kernel.outputs) for kernel in kernels)
    return (_ARRAYS - shared - has_trellis(layout.key, layout.value)) // len(kernels[0].sources)


@dataclass(frozen=True)
class Question:
    """Queries [B, Hq, L, Dk] and what is asked of the regions of all B, or of those of each.

    Attributes:
        sources: regions of a call; 1 where one is for all B.
        normalized: keys are taken for normalized ones, so that all calls for a batch run one text.
        scale: of scores.
        mask: an array is for one region.
    """

    queries: mx.array
    sources: int
    normalized: bool
    scale: float
    mask: Mask = None

    def _tiles(self, heads: int) -> tuple[int, int]:
        """Queries that are taken together, and how many tiles that makes."""
        rows, query_heads, length, _ = self.queries.shape
        per_head = query_heads // heads * length
        taken = min(QUERIES, 1 << (per_head - 1).bit_length())
        return taken, rows * heads * -(-per_head // taken)

    def attended(self, batch: Sequence[Regions], sinks: mx.array | None) -> mx.array:
        """Attention [B, Hq, L, Dv] to up to `sources` regions: in one kernel or in two, by the most tokens of a row."""
        if max(regions.tokens for regions in batch) > thresholds.current().short:
            return self.merged(self.blocks(batch), batch[0].layout, sinks)
        dim, layout = self.queries.shape[3], batch[0].layout
        simdgroups = _SHARING if dim <= _WIDE else _SHARING // 2
        inputs, arrays, constants, _ = self._arguments(batch, [_shared(regions, simdgroups) for regions in batch])
        _, tiles = self._tiles(batch[0].full_keys.shape[1])
        kernel, levels = with_levels(NORMALIZED_SHORT if self.normalized else ATTEND_SHORT, layout.key, layout.value)
        (attended,) = build.run(
            kernel,
            inputs=[*inputs, flips(layout.value.rotation), _logits(sinks), *levels, *arrays],
            constants=(*constants, ("SINKS", sinks is not None), ("SIMDGROUPS", simdgroups)),
            grid=(32 * simdgroups, 1, tiles),
            threadgroup=(32 * simdgroups, 1, 1),
            output_shapes=[(*self.queries.shape[:3], layout.value.head_dim)],
            output_dtypes=[self.queries.dtype],
        )
        return attended

    def blocks(self, batch: Sequence[Regions]) -> Blocks:
        """The first pass of two."""
        _, tiles = self._tiles(batch[0].full_keys.shape[1])
        cuts = [_cut(regions, tiles) for regions in batch]
        most = max(blocks for _, blocks in cuts)
        inputs, arrays, constants, sizes = self._arguments(batch, cuts)
        shape = self.queries.shape[:3]
        layout = batch[0].layout
        kernel, levels = with_levels(NORMALIZED_ATTEND if self.normalized else ATTEND, layout.key, layout.value)
        outputs, maxima, sums = build.run(
            kernel,
            inputs=[*inputs, *levels, *arrays],
            constants=constants,
            grid=(32, most, tiles),
            threadgroup=(32, 1, 1),
            output_shapes=[(*shape, most, layout.value.head_dim), (*shape, most), (*shape, most)],
            output_dtypes=[mx.float32] * 3,
        )
        return Blocks(outputs, maxima, sums, sizes, cuts)

    def merged(self, blocks: Blocks, layout: RowLayout, sinks: mx.array | None) -> mx.array:
        """The second pass: [B, Hq, L, Dv]."""
        shape, merging = self.queries.shape[:3], thresholds.current().merging
        (attended,) = build.run(
            MERGE,
            inputs=[*blocks[:3], flips(layout.value.rotation), _logits(sinks), table(blocks.sizes)],
            constants=(
                ("T", self.queries.dtype),
                ("SINKS", sinks is not None),
                ("SIMDGROUPS", merging),
                *codec_constants("VALUE", layout.value),
            ),
            grid=(32 * merging, math.prod(shape), 1),
            threadgroup=(32 * merging, 1, 1),
            output_shapes=[(*shape, layout.value.head_dim)],
            output_dtypes=[self.queries.dtype],
        )
        return attended

    def _arguments(self, batch: Sequence[Regions], cuts: list[tuple[int, int]]) -> _Arguments:
        rows, query_heads, length, _ = self.queries.shape
        heads, layout, kind = batch[0].full_keys.shape[1], batch[0].layout, batch[0].full_keys.dtype
        bias = mask_bias(self.mask, batch[0].tokens)
        times, causal = rows // len(batch), isinstance(self.mask, str)
        header = (query_heads, heads, length, causal, *struct.unpack("i", struct.pack("f", self.scale)))
        sizes = [*header, *_steps(bias), *_entries(batch, cuts) * times]
        own = [[_NO_ROWS if r.rows is None else r.rows, r.full_keys, r.full_values] for r in batch]
        if self.normalized:
            means = [_means(regions) for regions in batch]
            own = [[*arrays, *m.arrays] for arrays, m in zip(own, means, strict=True)]
            sizes += [number for m in means for number in m.sizes] * times
        own += own[:1] * (self.sources - len(batch))  # stand for rows that are not there
        constants: build.Constants = (
            ("T", self.queries.dtype),
            ("SOURCES", self.sources),
            ("QUERIES", self._tiles(heads)[0]),
            ("MASKED", isinstance(self.mask, mx.array)),
            ("FULL_BITS", 8 * kind.size),
            ("FULL_WORD", kind if kind.size == 2 else mx.float16),
            ("NORMALIZED", self.normalized),
            ("MEAN_TOKENS", MEAN_TOKENS),
            *layout_constants(layout),
        )
        inputs = [self.queries, flips(layout.key.rotation), bias, table(sizes)]
        return _Arguments(inputs, [array for arrays in zip(*own, strict=True) for array in arrays], constants, sizes)


def _entries(batch: Sequence[Regions], cuts: list[tuple[int, int]]) -> list[int]:
    """What `attend_sizes` says of each row."""
    most = max(blocks for _, blocks in cuts)
    sizes = [
        (r.sink_tokens, r.body, r.beside, 0 if r.rows is None else r.rows.shape[2], r.full_keys.shape[2]) for r in batch
    ]
    return [number for size, cut in zip(sizes, cuts, strict=True) for number in (*size, *cut, most)]


# Stand for the rows of an empty body, and for an index where tokens have none.
_NO_ROWS = mx.zeros((1, 1, 1, LEAST), mx.uint32)
_NO_INDEX = mx.zeros(LEAST, mx.int32)


class _Means(NamedTuple):
    """A row's own arrays of MEANS, and what `attend_sizes` says of them."""

    arrays: tuple[mx.array, mx.array, mx.array]
    sizes: tuple[int, int, bool]


def _means(regions: Regions) -> _Means:
    """Those of a row's normalization; of plain keys, or none, weights that are 1 and means that are 0."""
    found, shape = regions.normalization, regions.full_keys.shape
    if found is None:
        nothing = mx.zeros((*shape[:2], 1, shape[3]), mx.float16)
        found = KeyNormalization(mx.ones((*shape[:2], shape[3])), nothing, mx.zeros(regions.body, mx.int32))
    if found.index is None and found.first % 32:  # the kernel takes 32 tokens at once
        found = replace(found, index=found.mean_index(regions.body))
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
