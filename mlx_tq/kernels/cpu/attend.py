"""Attention on a CPU: attend.cpp."""

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_tq.codec.rows import RowLayout
from mlx_tq.kernels import arguments
from mlx_tq.kernels.cpu.arrays import Memory, Reader, evaluate
from mlx_tq.kernels.cpu.build import announce_kernel, run_kernel
from mlx_tq.kernels.cpu.codecs import (
    FULL_FORMATS,
    KeyGroupsStruct,
    RotationStruct,
    format_number,
    groups_struct,
    int32,
    levels_address,
    long,
    pointer,
    rotation_struct,
    thread_count,
)
from mlx_tq.kernels.gpu import UnsupportedByKernelError
from mlx_tq.kernels.regions import HeadRows, Mask, Regions, Selection
from mlx_tq.kernels.shared_prefixes import SharedPrefix, find_shared_prefixes

ANNOUNCED_TOKENS = 2048  # attention to fewer ends before another thread would be awake


class _Buffer(ctypes.Structure):
    """Mirror of the struct in calls.h, as are the others."""

    _fields_ = (
        ("keys", pointer),
        ("values", pointer),
        ("key_stride", long),
        ("value_stride", long),
        ("key_head_stride", long),
        ("value_head_stride", long),
        ("first", long),
    )


class _Part(ctypes.Structure):
    _fields_ = (
        ("buffers", ctypes.POINTER(_Buffer)),
        ("index", pointer),
        ("ranges", pointer),
        ("buffer_count", long),
        ("tokens", long),
        ("position", long),
        ("key_scale", int32),
        ("value_scale", int32),
        ("key_format", int32),
        ("value_format", int32),
        ("wide_key_scale", int32),
        ("wide_value_scale", int32),
        ("rotated", int32),
        ("window", int32),
    )


class _Cache(ctypes.Structure):
    _fields_ = (
        ("parts", ctypes.POINTER(_Part)),
        ("key_scale", pointer),
        ("means", pointer),
        ("mean_index", pointer),
        ("groups", KeyGroupsStruct),
        ("mean_head_stride", long),
        ("part_count", long),
        ("tokens", long),
        ("mean_first", long),
        ("packed_head", long),
    )


class _Prefix(ctypes.Structure):
    _fields_ = (("cache", _Cache), ("sequences", ctypes.POINTER(long)), ("sequence_count", long))


class _Attention(ctypes.Structure):
    _fields_ = (
        ("queries", pointer),
        ("query_strides", long * 3),
        ("caches", ctypes.POINTER(_Cache)),
        ("prefixes", ctypes.POINTER(_Prefix)),
        ("mask", pointer),
        ("mask_strides", long * 4),
        ("sinks", pointer),
        ("output", pointer),
        ("log_sums", pointer),
        ("levels", pointer),
        ("key_rotation", RotationStruct),
        ("value_rotation", RotationStruct),
        ("batch", long),
        ("heads", long),
        ("query_heads", long),
        ("length", long),
        ("prefix_count", long),
        ("key_dim", int32),
        ("value_dim", int32),
        ("causal", int32),
        ("mask_is_bool", int32),
        ("by_head", int32),
        ("threads", int32),
        ("scale", ctypes.c_float),
    )


def launch_attend(
    queries: mx.array, regions: Regions, *, scale: float, mask: Mask = None, sinks: mx.array | None = None
) -> mx.array:
    return launch_attend_batch(queries, [regions], scale=scale, mask=mask, sinks=sinks)


def launch_attend_batch(
    queries: mx.array, batch: Sequence[Regions], *, scale: float, mask: Mask = None, sinks: mx.array | None = None
) -> mx.array:
    """Attend to one cache of batch size B, or to B caches of batch size 1, with any number of queries."""
    sequences = range(queries.shape[0] // len(batch))
    sources = [_Source(regions, regions.as_group(), sequence) for regions in batch for sequence in sequences]
    prefixes = find_shared_prefixes(batch)
    for prefix in prefixes:
        for number in prefix.members:
            sources[number] = sources[number]._replace(skipped=prefix.tokens)
    return _attend(queries, sources, scale, mask, sinks, prefixes=prefixes)


def launch_by_group(
    queries: mx.array, regions: Regions, *, scale: float, mask: Mask = None, sinks: mx.array | None = None
) -> mx.array:
    return launch_batch_by_head(queries, [regions], scale=scale, mask=mask, sinks=sinks)


def launch_batch_by_head(
    queries: mx.array, batch: Sequence[Regions], *, scale: float, mask: Mask = None, sinks: mx.array | None = None
) -> mx.array:
    """Attend to B caches of batch size 1 whose heads may keep different tokens; `mask` is no array."""
    sources = [_Source(regions, group) for regions in batch for group in regions.groups or (regions.as_group(),)]
    if any(source.group.window is not None for source in sources):
        mask = "causal"
    return _attend(queries, sources, scale, mask, sinks, by_head=True)


def launch_log_sum_exp(queries: mx.array, regions: Regions) -> mx.array:
    """Return what `log_sum_exp` returns."""
    sums = np.empty(queries.shape[1:3], np.float32)
    call = _describe(regions, 1.0)
    call.log_sums = sums.ctypes.data
    _run(call, queries, [_Source(regions, regions.as_group())], "causal", None)
    return mx.array(sums.reshape(call.heads, -1))


def launch_attend_selected(
    queries: mx.array, regions: Regions, selection: Selection, *, scale: float
) -> tuple[mx.array, mx.array]:
    """Return what `attend_selected` returns."""
    selection.check(regions.packed_tokens)
    ranges, index = (
        None if array is None else np.array(array, np.int32) for array in (selection.ranges, selection.index)
    )
    output = np.empty((*queries.shape[:3], regions.layout.value.head_dim), np.float32)
    sums = np.empty(queries.shape[:3], np.float32)
    call, source = _describe(regions, scale), _Source(regions, regions.as_group())
    call.output, call.log_sums = output.ctypes.data, sums.ctypes.data
    count = regions.packed_tokens if index is None else len(index)
    if ranges is not None:
        count = int(ranges[:, 1].max())

    def fill(caches: ctypes.Array[_Cache], reader: Reader) -> object:
        alive = _fill(caches[0], source, reader, count)
        if regions.packed_tokens:
            packed = caches[0].parts[1]
            packed.ranges = None if ranges is None else ranges.ctypes.data
            packed.index = None if index is None else index.ctypes.data
        return alive

    _launch(call, queries, _arrays(source), fill, "causal", None, regions.full_tokens + count)
    return mx.array(output).astype(queries.dtype), mx.array(sums)


class _Source(NamedTuple):
    """KV heads of a sequence of a cache that keep the same tokens."""

    regions: Regions
    group: HeadRows  # their packed rows
    sequence: int = 0  # of the batch of `regions`
    skipped: int = 0  # packed tokens of a shared prefix, which is attended to by itself, with the sinks


def _attend(
    queries: mx.array,
    sources: Sequence[_Source],
    scale: float,
    mask: Mask,
    sinks: mx.array | None,
    *,
    by_head: bool = False,
    prefixes: Sequence[SharedPrefix] = (),
) -> mx.array:
    """Attend to a source for each sequence, or with `by_head` to all of a sequence, one after another."""
    regions = sources[0].regions
    output = np.empty((*queries.shape[:3], regions.layout.value.head_dim), np.float32)
    call = _describe(regions, scale)
    call.output, call.by_head = output.ctypes.data, by_head
    _run(call, queries, sources, mask, sinks, prefixes)
    return mx.array(output).astype(queries.dtype)


def _describe(regions: Regions, scale: float) -> _Attention:
    layout = regions.layout
    arguments.check_can_run(layout, regions.full_keys.dtype)
    return _Attention(
        key_rotation=rotation_struct(layout.key.rotation),
        value_rotation=rotation_struct(layout.value.rotation),
        heads=regions.full_keys.shape[1],
        key_dim=layout.key.head_dim,
        value_dim=layout.value.head_dim,
        scale=scale,
    )


def _run(
    call: _Attention,
    queries: mx.array,
    sources: Sequence[_Source],
    mask: Mask,
    sinks: mx.array | None,
    prefixes: Sequence[SharedPrefix] = (),
) -> None:
    arrays = {id(array): array for source in sources for array in _arrays(source)}

    def fill(caches: ctypes.Array[_Cache], reader: Reader) -> object:
        if not call.by_head:
            alive = [_fill(cache, source, reader) for cache, source in zip(caches, sources, strict=True)]
            return alive, _fill_prefixes(call, sources, prefixes, reader)
        filled, alive = 0, []
        for source in sources:
            first = filled - filled % call.heads  # of the sequence
            described = _Cache()
            alive.append(_fill(described, source, reader))
            for place, head in enumerate(source.group.heads):
                caches[first + head] = described
                caches[first + head].packed_head = place
            filled += len(source.group.heads)
        return alive

    _launch(call, queries, [*arrays.values()], fill, mask, sinks, sources[0].regions.tokens)


def launch_plain_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: Mask = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attend to keys [B, H, S, Dk] and values [B, H, S, Dv] that are in the model's dtype."""
    if keys.dtype not in FULL_FORMATS or keys.dtype != values.dtype or keys.shape[3] % 2:
        raise UnsupportedByKernelError(f"the CPU kernels cannot attend to {keys.dtype} keys of {keys.shape[3]} dims.")

    def fill(caches: ctypes.Array[_Cache], reader: Reader) -> object:
        memory = reader.read(keys), reader.read(values)
        parts = [_plain_part(row, *memory, keys.dtype, 0, keys.shape[2]) for row in range(len(caches))]
        for cache, part in zip(caches, parts, strict=True):
            cache.parts, cache.part_count, cache.tokens = ctypes.pointer(part), 1, keys.shape[2]
        return parts

    output = np.empty((*queries.shape[:3], values.shape[3]), np.float32)
    call = _Attention(heads=keys.shape[1], key_dim=keys.shape[3], value_dim=values.shape[3], scale=scale)
    call.key_rotation = call.value_rotation = rotation_struct(None)
    call.output = output.ctypes.data
    _launch(call, queries, [keys, values], fill, mask, sinks, keys.shape[2])
    return mx.array(output).astype(queries.dtype)


def _launch(
    call: _Attention,
    queries: mx.array,
    arrays: list[mx.array],
    fill: Callable[[ctypes.Array[_Cache], Reader], object],
    mask: Mask,
    sinks: mx.array | None,
    tokens: int,
) -> None:
    """Complete and run a call, whose caches `fill` describes from evaluated arrays."""
    batch, query_heads, length, _ = queries.shape
    q = queries.astype(mx.float32)
    bias = _as_bias(mask, (batch, query_heads, length, tokens))
    logits = None if sinks is None else mx.contiguous(sinks.astype(mx.float32))
    evaluate(q, bias, logits, arrays)
    if batch * tokens >= ANNOUNCED_TOKENS:
        announce_kernel()
    caches = (_Cache * (batch * call.heads if call.by_head else batch))()
    with Reader() as reader:
        alive = fill(caches, reader)
        memory = reader.read(q)
        if memory.strides[3] != q.itemsize:  # rare; a copy takes longer than attention to a short context
            q = mx.contiguous(q)
            evaluate(q)
            memory = reader.read(q)
        call.queries, call.query_strides = memory.address, (long * 3)(*(stride // 4 for stride in memory.strides[:3]))
        if bias is not None:
            memory = reader.read(bias)
            call.mask, call.mask_is_bool = memory.address, bias.dtype == mx.bool_
            call.mask_strides = (long * 4)(*(stride // bias.dtype.size for stride in memory.strides))
        if logits is not None:
            call.sinks = reader.read(logits).address
        call.caches, call.levels = caches, levels_address()
        call.batch, call.query_heads, call.length = batch, query_heads, length
        call.causal, call.threads = isinstance(mask, str), thread_count()
        run_kernel("attend", call)
        del alive


def _arrays(source: _Source) -> list[mx.array]:
    regions, group = source.regions, source.group
    arrays = [regions.full_keys, regions.full_values, *(part.rows for part in group.shared)]
    arrays += [array for array in (group.rows, group.mean_index) if array is not None]
    if regions.normalization is not None:
        arrays += [regions.normalization.scale, regions.normalization.means]
    return arrays


def _as_bias(mask: Mask, shape: tuple[int, ...]) -> mx.array | None:
    if not isinstance(mask, mx.array):
        return None
    return mx.broadcast_to(mask if mask.dtype == mx.bool_ else mask.astype(mx.float32), shape)


def _fill(cache: _Cache, source: _Source, reader: Reader, packed: int | None = None) -> object:
    """Describe a source, with `packed` packed tokens in place of all, and return what must stay alive."""
    regions, group, sequence, skipped = source
    packed = group.tokens if packed is None else packed
    sinks = min(regions.sink_tokens, regions.full_tokens)
    full_part = partial(_full_part, regions, sequence, reader)
    parts = [] if skipped else [full_part(0, sinks, 0)]
    if group.tokens > skipped:
        parts.append(_packed_part(source, skipped, group.tokens, reader))
        parts[-1].tokens = packed - skipped
    if group.window is not None:
        parts.append(full_part(sinks, group.sinks, sinks + packed))
        sinks = group.sinks
    parts.append(full_part(sinks, regions.full_tokens, sinks + packed, group.window or 0))
    return _fill_parts(cache, source, parts, regions.full_tokens + packed, skipped, reader)


def _fill_prefixes(
    call: _Attention, sources: Sequence[_Source], prefixes: Sequence[SharedPrefix], reader: Reader
) -> object:
    """Describe the prefixes that sources skip, and return what must stay alive."""
    alive: list[object] = []
    filled = (_Prefix * len(prefixes))()
    for prefix, (members, tokens) in zip(filled, prefixes, strict=True):
        source = sources[members[0]]
        prefix.sequences, prefix.sequence_count = (long * len(members))(*members), len(members)
        sinks = _full_part(source.regions, source.sequence, reader, 0, source.regions.sink_tokens, 0)
        parts = [sinks, _packed_part(source, 0, tokens, reader)]
        alive += [prefix, _fill_parts(prefix.cache, source, parts, source.regions.tokens, 0, reader)]
    call.prefixes, call.prefix_count = filled, len(prefixes)
    return alive


def _fill_parts(
    cache: _Cache, source: _Source, parts: list[_Part], tokens: int, first_row: int, reader: Reader
) -> object:
    """Describe a cache by its parts, of which the packed one begins with that row, and return what must stay alive."""
    cache.parts, cache.part_count, cache.tokens = (_Part * len(parts))(*parts), len(parts), tokens
    n, sequence, keys = source.regions.normalization, source.sequence, source.regions.full_keys
    groups = groups_struct(source.regions.layout.key, keys.shape[0], keys.shape[1], sequence)
    cache.groups = groups
    if n is not None:
        cache.key_scale = reader.read(n.scale).address + sequence * n.scale.shape[1] * n.scale.shape[2] * 4
        memory = reader.read(n.means)
        cache.means = memory.address + sequence * memory.strides[0]
        cache.mean_head_stride = memory.strides[1] // 2
        cache.mean_first = n.first + first_row
        if source.group.mean_index is not None:
            cache.mean_index = reader.read(source.group.mean_index).address + 4 * first_row
    return parts, groups


def _packed_part(source: _Source, start: int, stop: int, reader: Reader) -> _Part:
    """Describe packed tokens [start, stop) of a source."""
    regions, group, sequence, _ = source
    layout, buffers, first = regions.layout, [], 0
    for rows, count in [*group.shared, (group.rows, group.tokens)]:
        if rows is not None and first < stop and start < first + count:
            memory = reader.read(rows)
            buffer = _buffer(sequence, memory, memory)
            buffer.keys += 2 * layout.starts[0][0]
            buffer.values += 2 * layout.starts[1][0]
            buffer.first = first - start
            buffers.append(buffer)
        first += count
    part = _Part.from_buffer_copy(_packed_format(layout))
    part.buffers, part.buffer_count = (_Buffer * len(buffers))(*buffers), len(buffers)
    part.tokens, part.position = stop - start, regions.sink_tokens + start  # sinks come before tokens are packed
    return part


def _full_part(
    regions: Regions, sequence: int, reader: Reader, start: int, stop: int, position: int, window: int = 0
) -> _Part:
    """Describe full-precision tokens [start, stop)."""
    keys, values = reader.read(regions.full_keys), reader.read(regions.full_values)
    part = _plain_part(sequence, keys, values, regions.full_keys.dtype, start, stop)
    part.position, part.window = position, window
    return part


def _plain_part(sequence: int, keys: Memory, values: Memory, dtype: mx.Dtype, start: int, stop: int) -> _Part:
    """Describe tokens [start, stop) of full-precision keys and values."""
    buffer = _buffer(sequence, keys, values)
    buffer.keys += start * keys.strides[2]
    buffer.values += start * values.strides[2]
    number = FULL_FORMATS[dtype]
    return _Part(
        buffers=ctypes.pointer(buffer), buffer_count=1, tokens=stop - start, key_format=number, value_format=number
    )


def _buffer(sequence: int, keys: Memory, values: Memory) -> _Buffer:
    """Describe the rows of a sequence of the batch."""
    return _Buffer(
        keys=keys.address + sequence * keys.strides[0],
        values=values.address + sequence * values.strides[0],
        key_stride=keys.strides[2],
        value_stride=values.strides[2],
        key_head_stride=keys.strides[1],
        value_head_stride=values.strides[1],
    )


@lru_cache(maxsize=256)
def _packed_format(layout: RowLayout) -> _Part:
    key, value = layout.key, layout.value
    scales = [0 if codec.scale_dtype is None else codec.scale_dtype.size for codec in (key, value)]
    key_scale, value_scale = (2 * (scale - codes) for codes, scale in layout.starts)  # bytes behind the codes' first
    return _Part(
        key_scale=key_scale,
        value_scale=value_scale,
        key_format=format_number(key),
        value_format=format_number(value),
        wide_key_scale=scales[0] == 4,
        wide_value_scale=scales[1] == 4,
        rotated=True,
    )
