"""`Checkpoint`: the state of all layers after some tokens, as a record of its own and blocks that checkpoints share.

    record   summary | safetensors of the state, but for the rows in blocks
    block    of each array that grows with the tokens, the part of BLOCK_ROWS packed tokens, one after the other

A layer with two key formats stays in the record as a whole. Blocks are read straight into the arrays of the state, by
several threads, which is where their checksums are computed.
"""

import io
import json
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, CacheList

from mlx_tq.cache.layer import CompressedKVCache, can_trim
from mlx_tq.cache.packed_rows import BLOCK_ROWS
from mlx_tq.cache.recurrent_states import EXACT, PackedState, is_state, pack_state, unpack_state
from mlx_tq.codec.formats.base import dtype_name, dtype_of
from mlx_tq.config import BLOCK
from mlx_tq.errors import CacheFormatError, is_out_of_memory
from mlx_tq.prefix_cache.summary import Summary, read_summary
from mlx_tq.prompt_cache.cache_file import CacheState, join_caches, split_caches
from mlx_tq.prompt_cache.capacity import with_trimmed_windows

_THREADS = min(8, os.cpu_count() or 1)
_ROWS, _CODES, _SCALES = ".rows", ".codes", ".scales"
_DTYPES = ("uint32", "float16")  # of arrays that grow


@dataclass(frozen=True)
class _Growing:
    """An array of the state that grows along axis 2, by one entry for each `tokens` packed tokens."""

    shape: tuple[int, ...]  # of BLOCK_ROWS tokens
    dtype: str
    tokens: int


class Checkpoint:
    """The state of caches of `tokens`, from which nothing was evicted. The caches may go on; the checkpoint stays.

    Recurrent states are in one of the `STATE_FORMATS`.
    """

    def __init__(self, caches: list[Any], tokens: Sequence[int], state_format: str = EXACT) -> None:
        self._parts = split_caches([with_trimmed_windows(cache) for cache in caches])
        self.tokens = np.array(tokens, np.int32)
        layers: dict[str, Any] = {}  # by their paths in the states of all caches
        for index, cache in enumerate(caches):
            if isinstance(cache, CacheList):
                layers |= {f"{index}.{place}.0": part for place, part in enumerate(cache.caches)}
            else:
                layers[str(index)] = cache
        self._growing = {
            array: tokens
            for path, cache in layers.items()
            if isinstance(cache, CompressedKVCache) and cache.packed_tokens
            for name, tokens in cache.growing_state.items()
            if (array := f"{path}.{name}") in self._parts.arrays
        }
        compressed = [cache for cache in layers.values() if isinstance(cache, CompressedKVCache)]
        grow = [cache for cache in compressed if cache.growing_state and not cache.evicts]
        self._sinks = compressed[0].spec.sinks if compressed else 0
        self._has_prefixes = len(grow) == len(layers) and len({cache.spec.sinks for cache in grow}) == 1
        self._slack = BLOCK if can_trim(caches) else 0
        self._packed_states: dict[str, str] = {}  # their types before, by the names of their arrays
        if state_format != EXACT:
            self._pack_states(layers)

    def _pack_states(self, layers: dict[str, Any]) -> None:
        arrays = self._parts.arrays
        for path, cache in layers.items():
            for number, entry in enumerate(cache.cache if isinstance(cache, ArraysCache) else ()):
                if is_state(entry):
                    name = f"{path}.0.{number}"
                    packed = pack_state(arrays.pop(name))
                    arrays[name + _CODES], arrays[name + _SCALES] = packed
                    self._packed_states[name] = dtype_name(entry.dtype)

    @property
    def num_blocks(self) -> int:
        """Number of full blocks."""
        lengths = [self._parts.arrays[name].shape[2] * tokens for name, tokens in self._growing.items()]
        return min(lengths, default=0) // BLOCK_ROWS

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return sum(array.nbytes for array in self._parts.arrays.values())

    @property
    def block_nbytes(self) -> int:
        return sum(part.nbytes for part in self._slices(0, BLOCK_ROWS).values())

    def block(self, number: int) -> bytes:
        """Return a full block."""
        parts = self._slices(number * BLOCK_ROWS, (number + 1) * BLOCK_ROWS).values()
        return b"".join(np.array(mx.contiguous(part)).tobytes() for part in parts)

    def _slices(self, start: int, stop: int | None = None) -> dict[str, mx.array]:
        return {
            name: self._parts.arrays[name][:, :, start // tokens : stop and stop // tokens]
            for name, tokens in self._growing.items()
        }

    def record(self, root: str, block_keys: Sequence[str]) -> bytes:
        """Return the record: all but the blocks, whose keys are given."""
        growing = {
            name: (part.shape, str(np.array(part[:, :, :0]).dtype), self._growing[name])
            for name, part in self._slices(0, BLOCK_ROWS).items()
        }
        header = {
            "classes": self._parts.classes,
            "scalars": self._parts.scalars,
            "growing": growing,
            "sinks": self._sinks,
            "packed_states": self._packed_states,
        }
        summary = Summary(root, self.tokens, tuple(block_keys), self._slack, self._has_prefixes)
        file = io.BytesIO()
        arrays = self._parts.arrays | self._slices(len(block_keys) * BLOCK_ROWS)
        mx.save_safetensors(file, arrays, {"header": json.dumps(header)})
        return summary.to_bytes() + file.getvalue()


ReadBlock = Callable[[str, Sequence[memoryview]], bool]


def decode_checkpoint(data: bytes, read_block: ReadBlock, count: int | None = None) -> tuple[list[Any], Summary]:
    """Return the caches of a checkpoint, or those of its first `count` tokens, all packed, and its summary.

    Raises CacheFormatError if a part is damaged or missing.
    """
    try:
        file = io.BytesIO(data)
        summary = read_summary(file)
        arrays: Any
        metadata: Any
        arrays, metadata = mx.load(io.BytesIO(file.read()), format="safetensors", return_metadata=True)
        header = json.loads(metadata["header"])
        growing = {name: _Growing(tuple(shape), *rest) for name, (shape, *rest) in header["growing"].items()}
        scalars, rows = header["scalars"], None
        if count is not None:
            rows = count - header["sinks"]
            _drop_window(arrays, scalars, growing, count, header["sinks"])
        arrays |= _join_rows(arrays, growing, summary.block_keys, rows, read_block)
        for name, dtype in header["packed_states"].items():
            packed = PackedState(arrays.pop(name + _CODES), arrays.pop(name + _SCALES))
            arrays[name] = unpack_state(packed, dtype_of(dtype))
        return join_caches(CacheState(header["classes"], scalars, arrays)), summary
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise CacheFormatError(f"a checkpoint is incomplete ({error!r}). Its tokens are prefilled again.") from error


def _drop_window(
    arrays: dict[str, mx.array], scalars: dict[str, Any], growing: Iterable[str], count: int, sinks: int
) -> None:
    """Change the state of layers to that after a trim to `count` tokens, but for the arrays that grow."""
    for layer in {name.removesuffix(_ROWS) for name in growing if name.endswith(_ROWS)}:
        for name in (f"{layer}.keys", f"{layer}.values"):
            arrays[name] = arrays[name][:, :, :sinks]
        scalars[f"{layer}.length"] = scalars[f"{layer}.originals"] = count


def _join_rows(
    arrays: dict[str, mx.array],
    growing: dict[str, _Growing],
    block_keys: Sequence[str],
    rows: int | None,
    read_block: ReadBlock,
) -> dict[str, mx.array]:
    """Return the arrays that grow, from blocks and the record's own; those of the first `rows` rows, or all."""
    keys = block_keys if rows is None else block_keys[: -(-rows // BLOCK_ROWS)]
    buffers, edges = {}, {}
    for name, kind in growing.items():
        if kind.dtype not in _DTYPES:
            raise CacheFormatError(f"{name} has the type {kind.dtype}")
        batch, heads, length, dim = kind.shape
        rest = np.array(arrays[name])
        edges[name] = [length * number for number in range(len(keys) + 1)]
        buffer = np.empty((batch, heads, edges[name][-1] + rest.shape[2], dim), kind.dtype)
        buffer[:, :, edges[name][-1] :] = rest
        buffers[name] = buffer

    def read(number: int) -> bool:
        parts = [
            memoryview(head[edges[name][number] : edges[name][number + 1]]).cast("B")
            for name, buffer in buffers.items()
            for head in buffer.reshape(-1, *buffer.shape[2:])
        ]
        return read_block(keys[number], parts)

    with ThreadPoolExecutor(_THREADS) as threads:
        are_whole = list(threads.map(read, range(len(keys))))  # reading removes damaged ones: all
    if not all(are_whole):
        raise CacheFormatError(f"{are_whole.count(False)} of {len(are_whole)} blocks are damaged or missing")
    return {
        name: mx.array(buffer if rows is None else buffer[:, :, : -(-rows // growing[name].tokens)])
        for name, buffer in buffers.items()
    }
