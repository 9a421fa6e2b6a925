"""The one format in which packed rows leave memory: a block of up to 32 neighboring positions, all layers of it.

    b"TQB1" | crc32 of what follows | positions n, layers, bytes of keys: int64 | positions int64 [n]
    keys of each layer uint16 [H, n, words], their mean fp16 [H, D] | values of each layer uint16 [H, n, words]

All numbers are little-endian. Keys stand apart from values, so that who looks for a key reads nothing else. How many
heads and words a layer has is not in the block: a reader knows the layers that it restores.
"""

import struct
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mlx_tq.errors import CacheFormatError

MAGIC = b"TQB1"
_HEAD = struct.Struct("<4sI3q")


class LayerShape(NamedTuple):
    """What a block holds of a layer.

    heads: KV heads. key_words, value_words: 16-bit words of a token and head. mean: numbers of a head's mean, or 0.
    """

    heads: int
    key_words: int
    value_words: int
    mean: int

    def key_count(self, tokens: int) -> int:
        """16-bit words of the keys of so many tokens, and of their mean."""
        return self.heads * (tokens * self.key_words + self.mean)


@dataclass(frozen=True, eq=False)
class LayerRows:
    """Rows of one layer.

    Attributes:
        keys: uint16 [H, n, key_words].
        values: uint16 [H, n, value_words].
        mean: of the block of positions that these are of, fp16 [H, D]; None where keys are not normalized.
    """

    keys: np.ndarray
    values: np.ndarray
    mean: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Block:
    """Rows of all layers at the same positions, ascending int64 [n]."""

    positions: np.ndarray
    layers: list[LayerRows]


def to_bytes(block: Block) -> bytes:
    """A block as it is stored."""
    parts = [part for rows in block.layers for part in (rows.keys, rows.mean) if part is not None]
    keys = b"".join(part.tobytes() for part in parts)
    values = b"".join(rows.values.tobytes() for rows in block.layers)
    body = block.positions.astype("<i8").tobytes() + keys + values
    counts = struct.pack("<3q", len(block.positions), len(block.layers), len(keys))
    return MAGIC + struct.pack("<I", zlib.crc32(counts + body)) + counts + body


def from_bytes(data: bytes | memoryview, shapes: list[LayerShape]) -> Block:
    """The block that `to_bytes` wrote.

    Raises:
        CacheFormatError: it is damaged, or of other layers.
    """
    view = memoryview(data)
    if len(view) < _HEAD.size or view[:4] != MAGIC or struct.unpack_from("<I", view, 4)[0] != zlib.crc32(view[8:]):
        raise CacheFormatError("a block of packed rows is damaged. What it held is lost; go on without it.")
    _, _, count, layers, _ = _HEAD.unpack_from(view)
    words = sum(shape.key_count(count) + shape.heads * count * shape.value_words for shape in shapes)
    if layers != len(shapes) or len(view) != keys_start(count) + 2 * words:
        raise CacheFormatError(f"a block has rows of {layers} other layers than the {len(shapes)} of this model.")
    positions = np.frombuffer(view, "<i8", count, _HEAD.size).astype(np.int64)
    numbers = np.frombuffer(view, "<u2", offset=keys_start(count))
    at = 0
    keys, means, values = [], [], []
    for shape in shapes:
        size = shape.heads * count * shape.key_words
        keys.append(numbers[at : at + size].reshape(shape.heads, count, shape.key_words))
        at += size
        mean = numbers[at : at + shape.heads * shape.mean].view(np.float16)
        means.append(mean.reshape(shape.heads, shape.mean) if shape.mean else None)
        at += shape.heads * shape.mean
    for shape in shapes:
        size = shape.heads * count * shape.value_words
        values.append(numbers[at : at + size].reshape(shape.heads, count, shape.value_words))
        at += size
    return Block(positions, [LayerRows(*rows) for rows in zip(keys, values, means, strict=True)])


def keys_start(count: int) -> int:
    """Where the keys begin in a block of so many positions, in bytes."""
    return _HEAD.size + 8 * count
