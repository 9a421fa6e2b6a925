"""Attention of a few queries on a GPU: attend.metal and merge.metal, or attend_short.metal for short contexts.

Caches of a batch that have separate buffers attend in one call, as many as Metal can pass arrays: eight, or four with
normalized keys, and one less of each with trellis codes. Rows that several caches share are read once for all of them:
the queries of N caches are N times as many queries of one cache, and the result is merged with attention over each
cache's other rows (Hydragen, Juravsky et al. 2024).
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import mlx.core as mx

from mlx_tq.codec.normalization import MEAN_TOKENS, KeyNormalization
from mlx_tq.codec.rows import RowLayout
from mlx_tq.kernels import thresholds
from mlx_tq.kernels.arguments import (
    MIN_SIZE,
    check_can_run,
    codec_constants,
    layout_constants,
    pad_input,
    sign_flips,
    small_input,
    trellis_levels,
)
from mlx_tq.kernels.gpu import Constants, Kernel
from mlx_tq.kernels.regions import Mask, Regions

ATTEND = Kernel(
    "attend",
    inputs=("queries", "key_flips", "mask_bias", "attend_sizes"),
    sources=("packed_rows", "full_keys", "full_values"),
    normalized=("key_scale", "key_means", "mean_index"),
    outputs=("block_outputs", "block_maxima", "block_sums"),
)
MERGE = Kernel(
    "merge",
    inputs=("block_outputs", "block_maxima", "block_sums", "value_flips", "sink_logits", "attend_sizes"),
    outputs=("attended",),
)
ATTEND_SHORT = replace(
    ATTEND, name="attend_short", inputs=(*ATTEND.inputs, "value_flips", "sink_logits"), outputs=("attended",)
)
METAL_ARRAYS = 31  # arrays that Metal passes to a kernel
QUERIES = 4  # query rows for which a code is decoded once, as many as fit the registers of a lane
# Simdgroups of attend_short, and the widest keys for them: their threadgroup memory fits Metal's 32 KB.
_SHORT_SIMDGROUPS, _SHORT_DIM = 8, 256


def launch_attend(
    queries: mx.array, regions: Regions, *, scale: float, mask: Mask = None, sinks: mx.array | None = None
) -> mx.array:
    return launch_attend_batch(queries, [regions], scale=scale, mask=mask, sinks=sinks)


def launch_attend_batch(
    queries: mx.array, batch: Sequence[Regions], *, scale: float, mask: Mask = None, sinks: mx.array | None = None
) -> mx.array:
    """Attend to one cache of batch size B, or to B caches of batch size 1; a mask array is for one cache."""
    layout = batch[0].layout
    check_can_run(layout, queries.dtype, batch[0].full_keys.dtype)
    if isinstance(mask, mx.array) and batch[0].shared:
        batch = [replace(batch[0], packed_rows=batch[0].rows(), shared=())]
    normalized = any(regions.normalization is not None for regions in batch)
    sources = 1 if len(batch) == 1 else max_sources(layout, normalized=normalized)
    outputs = []
    for start, stop in _runs(batch, sources):
        call = _Call(queries if len(batch) == 1 else queries[start:stop], sources, normalized, scale, mask)
        attend = call.attend_shared if batch[start].shared else call.attend
        outputs.append(attend(batch[start:stop], sinks))
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def max_sources(layout: RowLayout, *, normalized: bool) -> int:
    """Return how many caches one call can serve."""
    inputs = max(len(kernel.inputs) + len(kernel.outputs) for kernel in (ATTEND, ATTEND_SHORT))
    per_source = len(ATTEND.sources) + (len(ATTEND.normalized) if normalized else 0)
    return (METAL_ARRAYS - inputs - len(trellis_levels(layout.key, layout.value))) // per_source


def _runs(batch: Sequence[Regions], limit: int) -> list[tuple[int, int]]:
    """Cut a batch into runs of at most `limit` neighbors that share the same rows, or none."""

    def shared(regions: Regions) -> list[tuple[int, int]]:
        return [(id(rows), count) for rows, count in regions.shared]

    edges = [0]
    for i, regions in enumerate(batch):
        if i - edges[-1] == limit or shared(regions) != shared(batch[edges[-1]]):
            edges.append(i)
    return list(pairwise([*edges, len(batch)]))


# Blocks that the packed tokens of a cache are cut into, and all its blocks.
_Cut = tuple[int, int]


class _BlockPartials(NamedTuple):
    """Partial attention of each block for queries [B, Hq, L, Dk]: output of attend.metal and input of merge.metal."""

    outputs: mx.array  # fp32 [B, Hq, L, blocks, Dv]
    maxima: mx.array  # fp32 [B, Hq, L, blocks]
    sums: mx.array  # fp32 [B, Hq, L, blocks]
    sizes: list[int]  # attend_sizes, see attend.metal


@dataclass(frozen=True)
class _Call:
    """Attention of queries over the regions of one cache of batch size B, or of up to `sources` of batch size 1.

    All calls for a batch have the same `sources` and `normalized`, and so run the same text. With `normalized`, plain
    keys get scales of 1 and means of 0. A mask array is for one cache.
    """

    queries: mx.array  # [B, Hq, L, Dk]
    sources: int
    normalized: bool
    scale: float
    mask: Mask = None

    def attend(self, batch: Sequence[Regions], sinks: mx.array | None) -> mx.array:
        """Attend in one kernel up to the threshold of tokens, else in two: [B, Hq, L, Dv]."""
        layout = batch[0].layout
        if max(regions.tokens for regions in batch) > thresholds.current().short_tokens:
            return self.merge(self.attend_blocks(batch), layout, sinks)
        simdgroups = _SHORT_SIMDGROUPS if self.queries.shape[3] <= _SHORT_DIM else _SHORT_SIMDGROUPS // 2
        cuts = [_divide_simdgroups(regions, simdgroups) for regions in batch]
        output_inputs = [sign_flips(layout.value.rotation), _sink_input(sinks)]
        inputs, constants, _ = self._arguments(batch, cuts, output_inputs)
        (attended,) = ATTEND_SHORT.run(
            inputs=inputs,
            constants=(*constants, ("SINKS", sinks is not None), ("SIMDGROUPS", simdgroups)),
            grid=(32 * simdgroups, 1, self._tiles(batch[0])[1]),
            threadgroup=(32 * simdgroups, 1, 1),
            output_shapes=[(*self.queries.shape[:3], layout.value.head_dim)],
            output_dtypes=[self.queries.dtype],
        )
        return attended

    def attend_blocks(self, batch: Sequence[Regions]) -> _BlockPartials:
        """Run the first of two kernels."""
        _, tiles = self._tiles(batch[0])
        cuts = [_cut_blocks(regions, tiles) for regions in batch]
        max_blocks = max(blocks for _, blocks in cuts)
        inputs, constants, sizes = self._arguments(batch, cuts, [])
        shape = (*self.queries.shape[:3], max_blocks)
        outputs, maxima, sums = ATTEND.run(
            inputs=inputs,
            constants=constants,
            grid=(32, max_blocks, tiles),
            threadgroup=(32, 1, 1),
            output_shapes=[(*shape, batch[0].layout.value.head_dim), shape, shape],
            output_dtypes=[mx.float32] * 3,
        )
        return _BlockPartials(outputs, maxima, sums, sizes)

    def merge(self, partials: _BlockPartials, layout: RowLayout, sinks: mx.array | None) -> mx.array:
        """Run the second of two kernels: [B, Hq, L, Dv]."""
        shape, simdgroups = self.queries.shape[:3], thresholds.current().merge_simdgroups
        value = dict(codec_constants("VALUE", layout.value))
        (attended,) = MERGE.run(
            inputs=[
                *(partials.outputs, partials.maxima, partials.sums),
                sign_flips(layout.value.rotation),
                _sink_input(sinks),
                small_input(partials.sizes),
            ],
            constants=(
                ("T", self.queries.dtype),
                ("SINKS", sinks is not None),
                ("SIMDGROUPS", simdgroups),
                *((name, value[name]) for name in ("VALUE_DIM", "VALUE_ORDER", "VALUE_ROTATED")),
            ),
            grid=(32 * simdgroups, math.prod(shape), 1),
            threadgroup=(32 * simdgroups, 1, 1),
            output_shapes=[(*shape, layout.value.head_dim)],
            output_dtypes=[self.queries.dtype],
        )
        return attended

    def attend_shared(self, batch: Sequence[Regions], sinks: mx.array | None) -> mx.array:
        """Attend to caches with the same shared rows: to each shared buffer once, then to each cache's other rows."""
        rows, heads, length, dim = self.queries.shape
        single = len(batch) == 1
        folded = self.queries if single else self.queries.swapaxes(0, 1).reshape(1, heads, rows * length, dim)
        shared_call = replace(self, queries=folded, sources=1, mask=None)
        partials, start = [], 0
        for buffer, tokens in batch[0].shared:
            part = _packed_part(batch[0], start, tokens, buffer)
            partials.append(shared_call.attend_blocks([replace(part, sink_tokens=0, full_tokens=0)]))
            start += tokens
        separate = self.attend_blocks([_packed_part(r, start, r.packed_tokens - start, r.packed_rows) for r in batch])

        def unfold(array: mx.array) -> mx.array:  # [1, Hq, B L, ...] -> [B, Hq, L, ...]
            return array if single else array.reshape(heads, rows, length, *array.shape[3:]).swapaxes(0, 1)

        outputs, maxima, sums = (
            mx.concatenate([*(unfold(array) for array in arrays), last], axis=3)
            for *arrays, last in zip(*(part[:3] for part in (*partials, separate)), strict=True)
        )
        shared_blocks = sum(part.maxima.shape[3] for part in partials)
        sizes = list(separate.sizes)
        for entry in range(8, 8 + 8 * rows, 8):  # blocks of shared rows come first
            sizes[entry + 5 : entry + 8] = [count + shared_blocks for count in sizes[entry + 5 : entry + 8]]
        return self.merge(_BlockPartials(outputs, maxima, sums, sizes), batch[0].layout, sinks)

    def _tiles(self, regions: Regions) -> tuple[int, int]:
        """Return the query rows of a tile, and the number of tiles."""
        rows, query_heads, length, _ = self.queries.shape
        heads = regions.full_keys.shape[1]
        per_head = query_heads // heads * length
        size = min(QUERIES, 1 << (per_head - 1).bit_length())
        return size, rows * heads * -(-per_head // size)

    def _arguments(
        self, batch: Sequence[Regions], cuts: list[_Cut], output_inputs: list[mx.array]
    ) -> tuple[list[mx.array], Constants, list[int]]:
        """Return the inputs of attend.metal or attend_short.metal, their constants, and `attend_sizes`."""
        rows, query_heads, length, _ = self.queries.shape
        first, layout = batch[0], batch[0].layout
        dtype, bias = first.full_keys.dtype, _mask_bias(self.mask, first.tokens)
        repeats, causal = rows // len(batch), isinstance(self.mask, str)
        scale_bits = struct.unpack("i", struct.pack("f", self.scale))
        sizes = [query_heads, first.full_keys.shape[1], length, causal, *scale_bits, *_bias_strides(bias)]
        sizes += _source_sizes(batch, cuts) * repeats
        sources = [[_NO_ROWS if r.packed_rows is None else r.packed_rows, r.full_keys, r.full_values] for r in batch]
        if self.normalized:
            means = [_mean_arguments(regions) for regions in batch]
            sources = [[*arrays, *more] for arrays, (more, _) in zip(sources, means, strict=True)]
            sizes += [number for _, numbers in means for number in numbers] * repeats
        sources += sources[:1] * (self.sources - len(batch))  # placeholders, which the kernel does not read
        constants: Constants = (
            ("T", self.queries.dtype),
            ("SOURCES", self.sources),
            ("QUERIES", self._tiles(first)[0]),
            ("MASKED", isinstance(self.mask, mx.array)),
            ("FULL_BITS", 8 * dtype.size),
            ("FULL_WORD", dtype if dtype.size == 2 else mx.float16),
            ("NORMALIZED", self.normalized),
            ("MEAN_TOKENS", MEAN_TOKENS),
            *layout_constants(layout),
        )
        inputs = [self.queries, sign_flips(layout.key.rotation), bias, small_input(sizes), *output_inputs]
        inputs += trellis_levels(layout.key, layout.value)
        return [*inputs, *(array for arrays in zip(*sources, strict=True) for array in arrays)], constants, sizes


# Placeholders for an empty packed region, and for an index where means need none.
_NO_ROWS = mx.zeros((1, 1, 1, MIN_SIZE), mx.uint32)
_NO_INDEX = mx.zeros(MIN_SIZE, mx.int32)


def _source_sizes(batch: Sequence[Regions], cuts: list[_Cut]) -> list[int]:
    max_blocks = max(blocks for _, blocks in cuts)
    sizes: list[int] = []
    for r, cut in zip(batch, cuts, strict=True):
        capacities = (0 if r.packed_rows is None else r.packed_rows.shape[2], r.full_keys.shape[2])
        sizes += [r.sink_tokens, r.packed_tokens, r.full_tokens, *capacities, *cut, max_blocks]
    return sizes


def _mean_arguments(regions: Regions) -> tuple[list[mx.array], list[int]]:
    """Return `key_scale`, `key_means` and `mean_index` of a cache, and their part of `attend_sizes`."""
    normalization = regions.normalization
    if normalization is None:
        batch, heads, _, dim = regions.full_keys.shape
        means = mx.zeros((batch, heads, 1, dim), mx.float16)
        index = mx.zeros(regions.packed_tokens, mx.int32)
        normalization = KeyNormalization(mx.ones((batch, heads, dim)), means, index)
    if normalization.index is None and normalization.first % 32:  # the kernel takes 32 tokens at once
        normalization = replace(normalization, index=normalization.mean_index(regions.packed_tokens))
    scale, means, given_index = normalization.scale, normalization.means, normalization.index
    arrays = [scale, means, _NO_INDEX if given_index is None else pad_input(given_index)]
    return arrays, [means.shape[2], normalization.first, given_index is not None]


def _packed_part(regions: Regions, start: int, tokens: int, rows: mx.array | None) -> Regions:
    """Return the regions with only the packed tokens that a buffer has, of which the first is number `start`."""
    normalization = regions.normalization and regions.normalization.after(start)
    return replace(regions, packed_rows=rows, packed_tokens=tokens, shared=(), normalization=normalization)


def _mask_bias(mask: Mask, tokens: int) -> mx.array:
    """Return a mask array as a bias of scores, fp32 [B, Hq, L, S], with 1 for broadcast axes but the last."""
    if not isinstance(mask, mx.array):
        return small_input([], mx.float32).reshape(1, 1, 1, -1)
    bias = mx.where(mask, 0.0, -mx.inf) if mask.dtype == mx.bool_ else mask
    bias = bias.astype(mx.float32).reshape((1,) * (4 - mask.ndim) + mask.shape)
    return mx.broadcast_to(bias, (*bias.shape[:3], tokens))


def _bias_strides(bias: mx.array) -> tuple[int, int, int]:
    """Return the strides of a bias along B, Hq and L, 0 for broadcast axes."""
    batch, heads, length, tokens = bias.shape
    return (batch > 1) * heads * length * tokens, (heads > 1) * length * tokens, (length > 1) * tokens


def _sink_input(sinks: mx.array | None) -> mx.array:
    return small_input([], mx.float32) if sinks is None else pad_input(sinks.astype(mx.float32))


def _cut_blocks(regions: Regions, tiles: int) -> _Cut:
    """Cut a cache into blocks, so that the tiles of queries keep the GPU busy."""
    limits = thresholds.current()
    packed, full = (
        min(-(-tokens // limits.min_block), max(1, limits.simdgroups // tiles), limits.max_blocks)
        for tokens in (regions.packed_tokens, regions.full_tokens)
    )
    return packed, packed + full


def _divide_simdgroups(regions: Regions, simdgroups: int) -> _Cut:
    """Divide the simdgroups of attend_short between packed and full-precision tokens, in proportion to them."""
    if not regions.packed_tokens:
        return 0, simdgroups
    share = round(simdgroups * regions.packed_tokens / regions.tokens)
    return min(max(share, 1), simdgroups - 1), simdgroups
