"""Attention of a few queries on a GPU: attend.metal and merge.metal, or attend_short.metal for short contexts.

One call serves as many sources (caches of a batch, or groups of KV heads that keep the same tokens) as Metal can pass
arrays: eight, or four with normalized keys, and one less with trellis codes; five or three with keys of sorted dims.
Rows that several caches share are read once: the queries of N caches are N times as many queries of one cache, whose
result is merged with attention over each cache's other rows (Hydragen, Juravsky et al. 2024).
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise, product, repeat
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_tq.codec.formats import Codec
from mlx_tq.codec.formats.sorted_pairs import SortedCodec
from mlx_tq.codec.formats.turbo import TurboCodec
from mlx_tq.codec.normalization import MEAN_TOKENS, KeyNormalization
from mlx_tq.codec.rows import RowLayout
from mlx_tq.kernels import arguments, backend, thresholds
from mlx_tq.kernels.gpu import Constants, Kernel, fit_simdgroups, simdgroup_grid
from mlx_tq.kernels.matrix_queries import matrix_queries
from mlx_tq.kernels.regions import HeadRows, Mask, Regions, SharedRows
from mlx_tq.kernels.shared_prefixes import SharedPrefix, find_shared_prefixes
from mlx_tq.kernels.thresholds import KernelThresholds

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
ATTEND_MATRIX = replace(
    ATTEND,
    name="attend_matrix",
    inputs=("rotated_queries", "plain_queries", "query_factors", "attend_sizes"),
    normalized=("mean_scores", "mean_index"),
)
ATTEND_SHORT = replace(
    ATTEND, name="attend_short", inputs=(*ATTEND.inputs, "value_flips", "sink_logits"), outputs=("attended",)
)
METAL_ARRAYS = 31  # arrays that Metal passes to a kernel
QUERIES = 8  # query rows for which a code is decoded once
_MATRIX_SIMDGROUPS = 8  # at most, of attend_matrix, which has eight query rows for each
_MATRIX_DIM = 256  # the widest vectors whose matrices fit the registers of a simdgroup
_ROWS = (1, 2, 4, 6, 8)  # of a tile: values of several rows are loaded four or two at a time
# Values of outputs in a lane: as many simdgroups share a tile as it takes to have no more than the first number. With
# more than the second, a tile has fewer rows.
_LANE_VALUES, _MOST_LANE_VALUES = 32, 64
_TEAMS = (1, 2, 4)
# Query rows and simdgroups of attend_short, half as many for wider keys: their threadgroup memory fits Metal's 32 KB.
_SHORT_QUERIES, _SHORT_SIMDGROUPS, _SHORT_DIM = 4, 8, 256


def launch_attend(
    queries: mx.array, regions: Regions, *, scale: float, mask: Mask = None, sinks: mx.array | None = None
) -> mx.array:
    return launch_attend_batch(queries, [regions], scale=scale, mask=mask, sinks=sinks)


def launch_attend_batch(
    queries: mx.array, batch: Sequence[Regions], *, scale: float, mask: Mask = None, sinks: mx.array | None = None
) -> mx.array:
    """Attend to one cache of batch size B, or to B caches of batch size 1; an array as mask requires one cache.

    The heads of a cache may keep different tokens; then its groups have no shared rows, and are no more than a call's.
    """
    layout = batch[0].layout
    arguments.check_can_run(layout, queries.dtype, batch[0].full_keys.dtype)
    if isinstance(mask, mx.array) and batch[0].shared:
        batch = [replace(batch[0], packed_rows=batch[0].rows(), shared=())]
    normalized = any(regions.normalization is not None for regions in batch)
    is_one = len(batch) == 1 and len(batch[0].groups) < 2
    sources = 1 if is_one else most_sources(layout, normalized=normalized)
    # For short contexts, one dispatch is cheaper than reading the shared rows once.
    short_tokens = thresholds.current(queries.shape[3], queries.shape[1] // batch[0].full_keys.shape[1]).short_tokens
    is_long = [bool(regions.shared) or regions.tokens > short_tokens for regions in batch]
    prefixes = [prefix for prefix in find_shared_prefixes(batch) if any(is_long[i] for i in prefix.members)]
    separate = set(range(len(batch))).difference(*(prefix.members for prefix in prefixes))
    groups = [*prefixes, *([SharedPrefix(tuple(sorted(separate)), 0)] if separate else [])]
    order = [number for members, _ in groups for number in members]
    is_sorted = order == sorted(order)
    if not is_sorted:
        queries, batch = mx.take(queries, mx.array(order), axis=0), [batch[number] for number in order]
    call = _Call(queries, batch, sources, normalized, scale, mask, sinks)
    outputs, start = [], 0
    for members, tokens in groups:
        stop = start + len(members)
        outputs += replace(call.part(start, stop), start=tokens).attend_group()
        start = stop
    output = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
    return output if is_sorted else mx.take(output, mx.array(np.argsort(order)), axis=0)


def most_sources(layout: RowLayout, *, normalized: bool) -> int:
    """Return how many sources a call can have."""
    arrays = max(len(kernel.inputs) + len(kernel.outputs) for kernel in (ATTEND, ATTEND_SHORT))
    arrays += len(arguments.trellis_levels(layout.key, layout.value))
    of_source = len(ATTEND.sources) + (len(ATTEND.normalized) if normalized else 0)
    return (METAL_ARRAYS - arrays) // (of_source + isinstance(layout.key, SortedCodec))


# Blocks that the packed tokens of a source are cut into, and all its blocks.
_Cut = tuple[int, int]


class _Source(NamedTuple):
    """KV heads of a cache whose packed rows lie in one buffer: all, or those that keep the same tokens."""

    row: int  # of the batch; the first, if the cache has several
    cache: Regions
    group: HeadRows
    offset: int  # rows of its buffer that are skipped


class _Piece(NamedTuple):
    """Packed tokens that lie in one buffer."""

    rows: mx.array | None
    offset: int  # rows of the buffer before the first
    start: int  # packed tokens of the cache before the first
    tokens: int


class _Tile(NamedTuple):
    """Query rows of one KV head for which a threadgroup of attend.metal decodes each code once."""

    rows: int
    team: int  # simdgroups that share it
    tiles: int  # of a call

    @property
    def simdgroups(self) -> int:
        return self.team * self.tiles


class _BlockPartials(NamedTuple):
    """Partial attention of each block for queries [B, Hq, L, Dk]: output of attend.metal and input of merge.metal."""

    outputs: mx.array  # fp32 [B, Hq, L, blocks, Dv]
    maxima: mx.array  # fp32 [B, Hq, L, blocks]
    sums: mx.array  # fp32 [B, Hq, L, blocks]
    sizes: list[int]  # attend_sizes, see attend.metal


@dataclass(frozen=True)
class _Call:
    """Attention of queries over one cache of batch size B, or several of batch size 1, of up to `sources` sources.

    All calls for a batch have the same `sources` and `normalized`, and so run the same text. With `normalized`, plain
    keys get scales of 1 and means of 0.
    """

    queries: mx.array  # [B, Hq, L, Dk]
    batch: Sequence[Regions]
    sources: int
    normalized: bool
    scale: float
    mask: Mask
    sinks: mx.array | None
    start: int = 0  # packed tokens that the caches share, and that are attended to together
    offsets: tuple[int, ...] = ()  # rows that are skipped in the buffer of each cache; by default none

    def part(self, start: int, stop: int) -> "_Call":
        """Return the part of the call for caches [start, stop)."""
        if stop - start == len(self.batch):
            return self
        return replace(self, queries=self.queries[start:stop], batch=self.batch[start:stop])

    def attend_group(self) -> list[mx.array]:
        """Attend to the shared tokens with all queries, then to each cache's own tokens.

        Each dispatch takes up to `sources` caches.
        """
        counts = [max(1, len(regions.groups)) for regions in self.batch]
        shared = [[(id(rows), *places) for rows, *places in self._shared_pieces(regions)] for regions in self.batch]
        edges = [0]
        for i in range(len(self.batch)):  # runs of neighbors that share the same other rows, or none
            if sum(counts[edges[-1] : i + 1]) > self.sources or shared[i] != shared[edges[-1]]:
                edges.append(i)
        first = self._attend_pieces(_pieces(self.batch[0].packed_buffers(), 0, self.start))
        return [
            self.part(start, stop).attend_rest([[array[start:stop] for array in blocks] for blocks in first])
            for start, stop in pairwise([*edges, len(self.batch)])
        ]

    def attend(self) -> mx.array:
        """Attend in one kernel up to the threshold of tokens, else in two: [B, Hq, L, Dv]."""
        if max(regions.tokens for regions in self.batch) > self._limits.short_tokens:
            return self.merge(self.attend_blocks())
        key, value = self.batch[0].layout.key, self.batch[0].layout.value
        # Levels of all widths, and of bytes of four 2-bit codes, leave less memory.
        has_large_tables = isinstance(key, SortedCodec) or any(_has_table(c, (2,)) for c in (key, value))
        limit = _SHORT_DIM // 2 if has_large_tables else _SHORT_DIM
        halves = 1 if self.queries.shape[3] <= limit else 2
        rows = _SHORT_QUERIES // halves
        return fit_simdgroups(_SHORT_SIMDGROUPS // halves, lambda simdgroups: self._attend_short(simdgroups, rows))

    def _attend_short(self, simdgroups: int, rows: int) -> mx.array:
        if simdgroups == 1:  # packed and full-precision tokens need one each
            return self.merge(self.attend_blocks())
        cuts = [_divide_simdgroups(source, simdgroups) for source in self._call_sources]
        value = self.batch[0].layout.value
        tile = self._tile(min(rows, simdgroups), is_short=True)
        arrays, constants, sizes = self._arguments(cuts, tile)
        outputs = [arguments.sign_flips(value.rotation), self._sink_input()]
        (attended,) = ATTEND_SHORT.run(
            inputs=[*self._query_inputs(sizes), *outputs, *arrays],
            constants=(*constants, ("SINKS", self.sinks is not None), ("SIMDGROUPS", simdgroups)),
            grid=(32 * simdgroups, 1, tile.tiles),
            threadgroup=(32 * simdgroups, 1, 1),
            output_shapes=[(*self.queries.shape[:3], value.head_dim)],
            output_dtypes=[self.queries.dtype],
        )
        return attended

    def attend_blocks(self) -> _BlockPartials:
        return fit_simdgroups(_MATRIX_SIMDGROUPS, self._attend_blocks)

    def _attend_blocks(self, simdgroups: int) -> _BlockPartials:
        """Attend with at most this many simdgroups in a threadgroup."""
        by_matrix = self._matrix_tile(simdgroups)
        tile, cuts = by_matrix or self._tile(QUERIES, simdgroups), list[_Cut]()
        packed_tokens = [source.group.tokens for source in self._call_sources]
        full_tokens = [source.cache.full_tokens for source in self._call_sources]
        for packed, full in zip(*(self._divide(tokens, tile) for tokens in (packed_tokens, full_tokens)), strict=True):
            cuts.append((packed, packed + full))
        max_blocks = max(blocks for _, blocks in cuts)
        arrays, constants, sizes = self._arguments(cuts, tile)
        inputs = self._matrix_inputs(sizes, arrays, tile.rows) if by_matrix else [*self._query_inputs(sizes), *arrays]
        shape = (*self.queries.shape[:3], max_blocks)
        outputs, maxima, sums = (ATTEND_MATRIX if by_matrix else ATTEND).run(
            inputs=inputs,
            constants=(*constants, ("SIMDGROUPS" if by_matrix else "TEAM", tile.team)),
            grid=(32 * tile.team, max_blocks, tile.tiles),
            threadgroup=(32 * tile.team, 1, 1),
            output_shapes=[(*shape, self.batch[0].layout.value.head_dim), shape, shape],
            output_dtypes=[mx.float32] * 3,
        )
        return _BlockPartials(outputs, maxima, sums, sizes)

    def _divide(self, tokens: list[int], tile: "_Tile") -> list[int]:
        """Return into how many blocks to cut the tokens of each source, so that the tiles keep the GPU busy."""
        limits, heads = self._limits, self.queries.shape[0] * self.batch[0].full_keys.shape[1]
        counts = [source.cache.full_keys.shape[0] * len(source.group.heads) for source in self._call_sources]
        total = sum(count * n for count, n in zip(counts, tokens, strict=True))
        blocks = [limits.simdgroups * heads * n // (tile.simdgroups * max(1, total)) for n in tokens]
        return [
            min(-(-n // limits.min_block), max(1, count), limits.max_blocks)
            for n, count in zip(tokens, blocks, strict=True)
        ]

    def merge(self, partials: _BlockPartials) -> mx.array:
        shape = self.queries.shape[:3]
        value = self.batch[0].layout.value
        constants = dict(arguments.codec_constants("VALUE", value))
        *arrays, sizes = partials
        inputs = [*arrays, arguments.sign_flips(value.rotation), self._sink_input(), arguments.small_input(sizes)]
        (attended,) = fit_simdgroups(
            self._limits.merge_simdgroups,
            lambda simdgroups: MERGE.run(
                inputs=inputs,
                constants=(
                    ("T", self.queries.dtype),
                    ("SINKS", self.sinks is not None),
                    ("SIMDGROUPS", simdgroups),
                    *((name, constants[name]) for name in ("VALUE_DIM", "VALUE_ORDER", "VALUE_ROTATED")),
                ),
                **simdgroup_grid(simdgroups * math.prod(shape), simdgroups),
                output_shapes=[(*shape, value.head_dim)],
                output_dtypes=[self.queries.dtype],
            ),
        )
        return attended

    def attend_rest(self, first: list[list[mx.array]]) -> mx.array:
        """Attend to the packed tokens from `start` on; `first` are blocks of those before."""
        shared = self._shared_pieces(self.batch[0])
        if not first and not shared:
            return self.attend()
        first = [*first, *self._attend_pieces(shared)]
        parts, offsets = [], []
        for regions in self.batch:
            start = max(self.start, sum(part.tokens for part in regions.shared))
            empty = _Piece(None, 0, start, 0)
            (piece,) = _pieces(regions.packed_buffers(), start, regions.packed_tokens) or [empty]
            parts.append(_packed_part(regions, piece))
            offsets.append(piece.offset)
        separate = replace(self, batch=parts, offsets=tuple(offsets)).attend_blocks()
        outputs, maxima, sums = (
            mx.concatenate(list(arrays), axis=3) for arrays in zip(*first, separate[:3], strict=True)
        )
        shared_blocks = sum(blocks[1].shape[3] for blocks in first)
        sizes = list(separate.sizes)
        sizes[_BLOCKS] += shared_blocks
        entries = self.queries.shape[0] * self.batch[0].full_keys.shape[1]
        for entry in range(_HEADER, _HEADER + _ENTRY * entries, _ENTRY):  # blocks of shared rows come first
            sizes[entry + 6 : entry + 8] = [count + shared_blocks for count in sizes[entry + 6 : entry + 8]]
        return self.merge(_BlockPartials(outputs, maxima, sums, sizes))

    def _shared_pieces(self, regions: Regions) -> list[_Piece]:
        return _pieces(regions.shared, self.start, regions.packed_tokens)

    def _attend_pieces(self, pieces: list[_Piece]) -> list[list[mx.array]]:
        """Attend with all queries to the same rows; return blocks of each piece, [B, Hq, L, blocks, ...]."""
        rows, query_heads, length, dim = self.queries.shape
        queries, is_one = self.queries, len(self.batch) == 1
        if pieces and not is_one:
            queries = queries.swapaxes(0, 1).reshape(1, query_heads, rows * length, dim)

        def unfold(array: mx.array) -> mx.array:  # [1, Hq, B L, ...] -> [B, Hq, L, ...]
            return array if is_one else array.reshape(query_heads, rows, length, *array.shape[3:]).swapaxes(0, 1)

        blocks = []
        for piece in pieces:
            part = replace(_packed_part(self.batch[0], piece), sink_tokens=0, full_tokens=0)
            call = replace(self, queries=queries, batch=[part], offsets=(piece.offset,), sources=1, mask=None)
            blocks.append([unfold(array) for array in call.attend_blocks()[:3]])
        return blocks

    def _sink_input(self) -> mx.array:
        return _NO_SINKS if self.sinks is None else arguments.pad_input(self.sinks.astype(mx.float32))

    def _tile(self, most: int, simdgroups: int = max(_TEAMS), *, is_short: bool = False) -> "_Tile":
        """Divide the query rows of each KV head into tiles of up to `most` rows, for attend or attend_short.

        At most `simdgroups` share a tile of attend.
        """
        rows, query_heads, length, _ = self.queries.shape
        heads, value = self.batch[0].full_keys.shape[1], self.batch[0].layout.value
        per_head = query_heads // heads * length
        even = -(-per_head // -(-per_head // most))
        size = next(size for size in _ROWS if size >= even)
        team, values = _team(size, value.head_dim, (arguments.count_units(value), value.head_dim), simdgroups)
        if values > _MOST_LANE_VALUES and size > 1:
            return self._tile(size // 2, simdgroups, is_short=is_short)
        return _Tile(size, 1 if is_short else team, rows * heads * -(-per_head // size))

    def _matrix_tile(self, most: int) -> "_Tile | None":
        """Return the tile of attend_matrix with up to `most` simdgroups, or None where attend.metal serves.

        It multiplies in half precision, and has no mask array and one cache; CUDA has no such matrices.
        """
        _, query_heads, length, _ = self.queries.shape
        heads, layout = self.batch[0].full_keys.shape[1], self.batch[0].layout
        per_head = query_heads // heads * length
        if (
            per_head < self._limits.matrix_queries
            or backend.current() != "metal"
            or len(self.batch) > 1
            or isinstance(self.mask, mx.array)
            or self.queries.dtype.size != 2
            or any(codec.head_dim % 32 or codec.head_dim > _MATRIX_DIM for codec in (layout.key, layout.value))
        ):
            return None
        tiles = -(-per_head // (8 * most))
        simdgroups = -(-per_head // (8 * tiles))
        return _Tile(8 * simdgroups, simdgroups, self.queries.shape[0] * heads * tiles)

    @cached_property
    def _call_sources(self) -> list[_Source]:
        return [
            _Source(row, cache, group, offset)
            for row, (cache, offset) in enumerate(zip(self.batch, self.offsets or repeat(0), strict=False))
            for group in cache.groups or (cache.as_group(),)
        ]

    @cached_property
    def _limits(self) -> KernelThresholds:
        heads = self.batch[0].full_keys.shape[1]
        return thresholds.current(self.queries.shape[3], self.queries.shape[1] // heads)

    @cached_property
    def _bias(self) -> tuple[mx.array, tuple[int, int, int]]:
        return _mask_bias(self.mask, self.batch[0].tokens)

    def _query_inputs(self, sizes: list[int]) -> list[mx.array]:
        """Return the first inputs of attend and attend_short."""
        bias, _ = self._bias
        flips = arguments.sign_flips(self.batch[0].layout.key.rotation)
        return [self.queries, flips, bias, arguments.small_input(sizes)]

    def _matrix_inputs(self, sizes: list[int], arrays: list[mx.array], rows: int) -> list[mx.array]:
        """Return the inputs of attend_matrix, which gets scores of the means of keys, and not scale and means."""
        queries = matrix_queries(self.queries, self.batch[0], self.scale, rows)
        if self.normalized:
            count = self.sources
            means, indices, arrays = arrays[-2 * count], arrays[-count:], arrays[: -3 * count]
            scores = queries.mean_scores
            if scores is None:
                scores = mx.zeros((*queries.rotated.shape[:3], means.shape[2]))
            arrays = [*arrays, *[scores] * count, *indices]
        return [queries.rotated, queries.plain, queries.factors, arguments.small_input(sizes), *arrays]

    def _arguments(self, cuts: list[_Cut], tile: "_Tile") -> tuple[list[mx.array], Constants, list[int]]:
        """Return the arrays of the sources, with the levels of trellis codes, the constants, and `attend_sizes`."""
        rows, query_heads, length, _ = self.queries.shape
        full_keys, layout = self.batch[0].full_keys, self.batch[0].layout
        heads, dtype, causal = full_keys.shape[1], full_keys.dtype, isinstance(self.mask, str)
        _, bias_strides = self._bias
        scale_bits = struct.unpack("i", struct.pack("f", self.scale))
        entries = [[0]] * (rows * heads)  # of each KV head of each row
        key_groups = [
            arguments.key_groups(cache.layout.key, cache.full_keys.shape[0], heads)
            for _, cache, _, _ in self._call_sources
        ]
        means = [_mean_arguments(source) if self.normalized else ([], []) for source in self._call_sources]
        for number, (source, cut, (_, mean_numbers)) in enumerate(zip(self._call_sources, cuts, means, strict=True)):
            first_row, cache, group, offset = source
            capacity = 0 if group.rows is None else group.rows.shape[2]
            tokens = (cache.sink_tokens, group.tokens, cache.full_tokens)
            for row, (i, head) in product(range(cache.full_keys.shape[0]), enumerate(group.heads)):
                places = (
                    (row * len(group.heads) + i) * capacity + offset,
                    row * heads + head,
                    cache.full_keys.shape[2],
                )
                entries[(first_row + row) * heads + head] = [*tokens, *places, *cut, number, *mean_numbers]
        sizes = [query_heads, heads, length, causal, *scale_bits, *bias_strides, max(blocks for _, blocks in cuts)]
        sizes += [number for entry in entries for number in entry[:_ENTRY]]
        sizes += [number for entry in entries for number in entry[_ENTRY:]]
        sources = [
            [_NO_ROWS if group.rows is None else group.rows, cache.full_keys, cache.full_values, *groups, *arrays]
            for (_, cache, group, _), groups, (arrays, _) in zip(self._call_sources, key_groups, means, strict=True)
        ]
        sources += sources[:1] * (self.sources - len(sources))  # placeholders, which the kernel does not read
        constants: Constants = (
            ("T", self.queries.dtype),
            ("SOURCES", self.sources),
            ("QUERIES", tile.rows),
            ("MASKED", isinstance(self.mask, mx.array)),
            ("FULL_BITS", 8 * dtype.size),
            ("FULL_WORD", dtype if dtype.size == 2 else mx.float16),
            ("NORMALIZED", self.normalized),
            ("MEAN_TOKENS", MEAN_TOKENS),
            *arguments.layout_constants(layout),
            *arguments.place_constants(layout),
            ("KEY_TABLE", self._limits.level_tables == 2 and _has_table(layout.key)),
            ("VALUE_TABLE", self._limits.level_tables > 0 and _has_table(layout.value)),
        )
        levels = arguments.trellis_levels(layout.key, layout.value)
        return [*levels, *chain.from_iterable(zip(*sources, strict=True))], constants, sizes


_HEADER, _BLOCKS, _ENTRY = 9, 8, 9  # numbers of attend_sizes before its entries, place of BLOCKS, and those of an entry
# Placeholders for an empty packed region, for means without an index, and for no sink logits.
_NO_ROWS = mx.zeros((1, 1, 1, arguments.MIN_SIZE), mx.uint32)
_NO_INDEX = mx.zeros(arguments.MIN_SIZE, mx.int32)
_NO_SINKS = mx.zeros(arguments.MIN_SIZE)


def _mean_arguments(source: _Source) -> tuple[list[mx.array], list[int]]:
    """Return `key_scale`, `key_means` and `mean_index` of a source, and their part of `attend_sizes`."""
    _, cache, group, _ = source
    normalization = cache.normalization
    if normalization is None:
        batch, heads, _, dim = cache.full_keys.shape
        means = mx.zeros((batch, heads, 1, dim), mx.float16)
        index = mx.zeros(group.tokens, mx.int32)
        normalization = KeyNormalization(mx.ones((batch, heads, dim)), means, index)
    elif cache.groups:
        normalization = replace(normalization, index=group.mean_index)
    if normalization.index is None and normalization.first % 32:  # the kernel takes 32 tokens at once
        normalization = replace(normalization, index=normalization.mean_index(group.tokens))
    scale, means, given_index = normalization.scale, normalization.means, normalization.index
    arrays = [scale, means, _NO_INDEX if given_index is None else arguments.pad_input(given_index)]
    return arrays, [means.shape[2], normalization.first, given_index is not None]


def _pieces(buffers: Sequence[SharedRows], start: int, stop: int) -> list[_Piece]:
    """Return packed tokens [start, stop) by their buffers."""
    pieces, first = [], 0
    for rows, count in buffers:
        begin, end = max(first, start), min(first + count, stop)
        if begin < end:
            pieces.append(_Piece(rows, begin - first, begin, end - begin))
        first += count
    return pieces


def _packed_part(regions: Regions, piece: _Piece) -> Regions:
    """Return the regions with only the packed tokens of one buffer."""
    normalization = regions.normalization and regions.normalization.after(piece.start)
    return replace(regions, packed_rows=piece.rows, packed_tokens=piece.tokens, shared=(), normalization=normalization)


def _mask_bias(mask: Mask, tokens: int) -> tuple[mx.array, tuple[int, int, int]]:
    """Return a mask array as a bias of scores, fp32 [B, Hq, L, S], and its strides; a broadcast axis has stride 0."""
    if not isinstance(mask, mx.array):
        return arguments.small_input([], mx.float32).reshape(1, 1, 1, -1), (0, 0, 0)
    bias = mx.where(mask, 0.0, -mx.inf) if mask.dtype == mx.bool_ else mask
    bias = bias.astype(mx.float32).reshape((1,) * (4 - mask.ndim) + mask.shape)
    batch, heads, length, _ = bias.shape
    strides = (batch > 1) * heads * length * tokens, (heads > 1) * length * tokens, (length > 1) * tokens
    return mx.broadcast_to(bias, (batch, heads, length, tokens)), strides


def _team(rows: int, dim: int, units: Sequence[int], most: int) -> tuple[int, int]:
    """Return how many simdgroups, up to `most`, share a tile, and how many values of outputs a lane then has.

    `units` are those of a packed and of a full-precision value vector. A team of several needs one for each lane.
    """
    teams = {
        team: rows * max(dim // count * -(-count // (32 * team)) for count in units)
        for team in _TEAMS
        if team == 1 or (team <= most and min(units) >= 32 * team)
    }
    return next(((t, n) for t, n in teams.items() if n <= _LANE_VALUES), max(teams.items()))


def _has_table(codec: Codec, widths: tuple[int, ...] = (2, 4)) -> bool:
    """Return whether the levels of whole bytes of codes, of these widths, can be looked up."""
    return isinstance(codec, TurboCodec) and not arguments.has_states(codec) and codec.bits in widths


def _divide_simdgroups(source: _Source, simdgroups: int) -> _Cut:
    """Divide the simdgroups of attend_short between packed and full-precision tokens, in proportion to them."""
    packed = source.group.tokens
    if not packed:
        return 0, simdgroups
    share = round(simdgroups * packed / (packed + source.cache.full_tokens))
    return min(max(share, 1), simdgroups - 1), simdgroups
