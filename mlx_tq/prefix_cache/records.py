"""Checkpoints as records: blocks of packed rows, and one record with the rest of all layers' state and the block keys.

A block is ROWS packed tokens of all layers; the checkpoints of a prompt share their blocks. A layer with two key
formats stays in the checkpoint's own record.
"""

import io
import json
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.errors import CacheFormatError
from mlx_tq.prompt_cache.cache_file import CacheParts, join_caches, split_caches
from mlx_tq.prompt_cache.statistics import tokens_seen

ROWS = 256


def _growing_arrays(caches: list[Any]) -> dict[str, int]:
    """Return the paths, in the states of all caches, of arrays that grow along axis 2, and the tokens of an entry."""
    layers: dict[str, Any] = {}
    for index, cache in enumerate(caches):
        if isinstance(cache, CacheList):
            layers |= {f"{index}.{place}.0": part for place, part in enumerate(cache.caches)}
        else:
            layers[str(index)] = cache
    return {
        f"{path}.{name}": tokens
        for path, cache in layers.items()
        if isinstance(cache, CompressedKVCache) and cache.packed_tokens
        for name, tokens in cache.growing_state.items()
    }


class Checkpoint:
    """The state of caches from which nothing was evicted. The caches may go on; the checkpoint stays."""

    def __init__(self, caches: list[Any]) -> None:
        self._parts, self._tokens = split_caches(caches), tokens_seen(caches)
        growing = _growing_arrays(caches)
        self._growing = {name: tokens for name, tokens in growing.items() if name in self._parts.arrays}

    def encode_blocks(self, start: int) -> list[bytes]:
        """Return the full blocks from number `start` on."""
        lengths = [self._parts.arrays[name].shape[2] * tokens for name, tokens in self._growing.items()]
        count = min(lengths, default=0) // ROWS
        return [_to_bytes(self._slices(number * ROWS, (number + 1) * ROWS), {}) for number in range(start, count)]

    def _slices(self, start: int, stop: int | None = None) -> dict[str, mx.array]:
        return {
            name: self._parts.arrays[name][:, :, start // tokens : stop and stop // tokens]
            for name, tokens in self._growing.items()
        }

    def encode(self, block_keys: list[str]) -> bytes:
        """Return the checkpoint's own record: all but the first blocks, whose keys are given."""
        header = {"classes": self._parts.classes, "scalars": self._parts.scalars, "growing": list(self._growing)}
        arrays = self._parts.arrays | self._slices(len(block_keys) * ROWS)
        return _to_bytes(arrays, header | {"blocks": block_keys, "tokens": self._tokens})


def decode_checkpoint(data: bytes, read_block: Callable[[str], bytes | None]) -> tuple[list[Any], list[str]]:
    """Return the caches of a checkpoint and its block keys; raise CacheFormatError if a part is damaged or missing."""
    try:
        arrays, header = _from_bytes(data)
        blocks = [_from_bytes(read_block(key) or b"")[0] for key in header["blocks"]]
        for name in header["growing"] if blocks else ():
            arrays[name] = mx.concatenate([*(block[name] for block in blocks), arrays[name]], axis=2)
        return join_caches(CacheParts(header["classes"], header["scalars"], arrays)), header["blocks"]
    except (KeyError, IndexError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise CacheFormatError(f"a checkpoint is incomplete ({error!r}). Its tokens are prefilled again.") from error


def describe_checkpoint(data: bytes) -> dict[str, int]:
    """Return how many tokens and blocks the record of a checkpoint has."""
    _, header = _from_bytes(data)
    return {"tokens": header["tokens"], "blocks": len(header["blocks"])}


def _to_bytes(arrays: dict[str, mx.array], header: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    mx.save_safetensors(file, arrays, {"header": json.dumps(header)})
    return file.getvalue()


def _from_bytes(data: bytes) -> tuple[dict[str, mx.array], dict[str, Any]]:
    arrays: Any
    metadata: Any
    arrays, metadata = mx.load(io.BytesIO(data), format="safetensors", return_metadata=True)
    return arrays, json.loads(metadata["header"])
