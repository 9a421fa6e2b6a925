"""Blocks: the packed rows of up to 32 neighboring positions, of all layers, and the bytes in which they leave memory.

    b"TQB1" | crc32 of what follows | positions n, layers, bytes of keys: int64 | positions int64 [n]
    keys of each layer uint16 [H, n, words], their mean fp16 [H, D] | values of each layer uint16 [H, n, words]

All numbers are little-endian. Keys lie apart from values, so that a key scan reads only keys. The number of heads and
words of a layer is not stored: a reader knows the layers that it restores.
"""

import struct
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mlx_tq.errors import CacheFormatError

_MAGIC = b"TQB1"
_HEAD = struct.Struct("<4sI3q")


class LayerShape(NamedTuple):
    """The shape of one layer's rows in a block."""

    heads: int  # KV heads
    key_words: int  # 16-bit words of a token and head
    value_words: int
    mean: int  # numbers of a head's mean, or 0

    def key_count(self, tokens: int) -> int:
        """Return the 16-bit words of the keys of `tokens` tokens and of their mean."""
        return self.heads * (tokens * self.key_words + self.mean)


@dataclass(frozen=True, eq=False)
class LayerRows:
    """Rows of one layer: keys and values uint16 [H, n, words], and the mean fp16 [H, D] of normalized keys."""

    keys: np.ndarray
    values: np.ndarray
    mean: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Block:
    """Rows of all layers at the same positions, ascending int64 [n]."""

    positions: np.ndarray
    layers: list[LayerRows]


def keys_start(count: int) -> int:
    """Return the byte at which the keys of a block of `count` positions begin."""
    return _HEAD.size + 8 * count


def block_nbytes(count: int, shapes: list[LayerShape]) -> int:
    """Return the bytes of a block of `count` positions."""
    words = sum(shape.key_count(count) + shape.heads * count * shape.value_words for shape in shapes)
    return keys_start(count) + 2 * words


def to_bytes(block: Block) -> bytes:
    parts = [part for rows in block.layers for part in (rows.keys, rows.mean) if part is not None]
    keys = b"".join(part.tobytes() for part in parts)
    values = b"".join(rows.values.tobytes() for rows in block.layers)
    data = block.positions.astype("<i8").tobytes() + keys + values
    counts = struct.pack("<3q", len(block.positions), len(block.layers), len(keys))
    return _MAGIC + struct.pack("<I", zlib.crc32(counts + data)) + counts + data


def from_bytes(data: bytes | memoryview, shapes: list[LayerShape]) -> Block:
    """Return the block that `to_bytes` wrote; raise CacheFormatError if it is damaged or of other layers."""
    view = memoryview(data)
    if len(view) < _HEAD.size or view[:4] != _MAGIC or struct.unpack_from("<I", view, 4)[0] != zlib.crc32(view[8:]):
        raise CacheFormatError("a block of packed rows is damaged. What it held is lost; go on without it.")
    _, _, count, layers, _ = _HEAD.unpack_from(view)
    if layers != len(shapes) or len(view) != block_nbytes(count, shapes):
        raise CacheFormatError(f"a block has rows of {layers} other layers than the {len(shapes)} of this model.")
    positions = np.frombuffer(view, "<i8", count, _HEAD.size).astype(np.int64)
    numbers, start = np.frombuffer(view, "<u2", offset=keys_start(count)), 0

    def take(*shape: int) -> np.ndarray:
        nonlocal start
        begin, start = start, start + int(np.prod(shape))
        return numbers[begin:start].reshape(shape)

    keys, means = [], []
    for shape in shapes:
        keys.append(take(shape.heads, count, shape.key_words))
        means.append(take(shape.heads, shape.mean).view(np.float16) if shape.mean else None)
    values = [take(shape.heads, count, shape.value_words) for shape in shapes]
    return Block(positions, [LayerRows(*rows) for rows in zip(keys, values, means, strict=True)])
