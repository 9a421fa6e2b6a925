"""A resume point as records: blocks of packed rows, and one record with all else, which names its blocks.

Blocks have the format of `cache.blocks`, ROWS positions each, of all layers whose rows lie in one piece; a layer with
two formats of keys stays in the point as it is. Points of one prompt share their blocks.
"""

import hashlib
import io
import json
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import CacheList

from mlx_tq.cache.blocks import Block, LayerRows, LayerShape, from_bytes, to_bytes
from mlx_tq.cache.files import Parts, put_together, take_apart
from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.codec.normalization import MEAN_TOKENS
from mlx_tq.codec.rows import RowLayout
from mlx_tq.errors import CacheFormatError
from mlx_tq.prompt_cache.statistics import tokens_seen

ROWS = 256
_MEANS = ROWS // MEAN_TOKENS  # of keys, in a block
# Where the state of a layer has its keys and values in the model's type, its rows, what it is, and the means of keys.
_KEYS, _VALUES, _BODY, _ABOUT, _MEAN = "0", "1", "2", "8", "11.2"


def block_name(data: bytes, begin: bytes = b"") -> str:
    """What a block is called: 64 hex digits of its content, and of what the keys of its points begin with.

    So it takes no longer to store what another API key's clients have not sent.
    """
    digest = hashlib.sha256(begin)
    digest.update(data)
    return digest.hexdigest()


class Point:
    """Caches from which nothing has left, taken apart.

    Args:
        caches: which may go on; the point stays.
    """

    def __init__(self, caches: list[Any]) -> None:
        self._parts, self._paths, self._tokens = take_apart(caches), _paths(caches), tokens_seen(caches)
        self._layers = [_Layer(self._parts, path) for path in self._paths]

    def new_blocks(self, known: int) -> list[bytes]:
        """The full blocks, but for the first `known` ones."""
        return [_block(self._layers, number) for number in range(known, _count(self._layers))]

    def to_bytes_without(self, names: list[str]) -> bytes:
        """The record of the point: all of its caches but the rows in blocks, the names of which it has."""
        arrays, count = dict(self._parts.arrays), len(names)
        for layer in self._layers if names else []:
            arrays[layer.body] = layer.rows[:, :, count * ROWS :]
            if layer.means is not None:
                arrays[layer.mean] = layer.means[:, :, count * _MEANS :]
        about = {
            "classes": self._parts.classes,
            "scalars": self._parts.scalars,
            "paths": self._paths,
            "blocks": names,
            "tokens": self._tokens,
        }
        file = io.BytesIO()
        mx.save_safetensors(file, arrays, {"point": json.dumps(about)})
        return file.getvalue()


def summary(data: bytes) -> dict[str, int]:
    """Tokens that the record of a resume point is of, and how many blocks it names."""
    loaded: Any = mx.load(io.BytesIO(data), format="safetensors", return_metadata=True)
    about = json.loads(loaded[1]["point"])
    return {"tokens": about["tokens"], "blocks": len(about["blocks"])}


def from_record(data: bytes, read_block: Callable[[str], bytes | None]) -> list[Any] | None:
    """The caches of a resume point; None where a block is missing.

    Args:
        data: of `Point.to_bytes_without`.
        read_block: gives a block by its name, or None.

    Raises:
        CacheFormatError: the record holds something else.
    """
    try:
        loaded: Any = mx.load(io.BytesIO(data), format="safetensors", return_metadata=True)
        arrays, header = loaded
        about = json.loads(header["point"])
        parts = Parts(about["classes"], about["scalars"], arrays)
        layers = [_Layer(parts, path) for path in about["paths"]]
        blocks = []
        for name in about["blocks"]:
            block = read_block(name)
            if block is None:
                return None
            blocks.append(from_bytes(block, [layer.shape for layer in layers]))
        for number, layer in enumerate(layers):
            if blocks:
                layer.put([block.layers[number] for block in blocks])
        return put_together(parts)
    except (KeyError, IndexError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise CacheFormatError(f"a resume point is damaged ({error!r}). Its text is read anew.") from error


class _Layer:
    """One layer's rows and means among the parts of caches."""

    def __init__(self, parts: Parts, path: str) -> None:
        self.arrays, self.path = parts.arrays, path
        self.body, self.mean = f"{path}.{_BODY}", f"{path}.{_MEAN}"
        self.spec = CacheSpec.from_dict(json.loads(parts.scalars[f"{path}.{_ABOUT}"])["spec"])

    @property
    def rows(self) -> mx.array:
        return self.arrays[self.body]

    @property
    def means(self) -> mx.array | None:
        return self.arrays.get(self.mean)

    @property
    def layout(self) -> RowLayout:
        keys, values = (self.arrays[f"{self.path}.{name}"] for name in (_KEYS, _VALUES))
        return self.spec.layout(keys.shape[3], values.shape[3], keys.dtype)

    @property
    def shape(self) -> LayerShape:
        keys, values = self.layout.split_sizes
        return LayerShape(self.rows.shape[1], keys, values, 0 if self.means is None else _MEANS * self.means.shape[3])

    def block(self, number: int) -> LayerRows:
        """Rows and means of a block, the means of a head side by side."""
        rows = self.rows[:, :, number * ROWS : (number + 1) * ROWS]
        keys, values = (np.array(part[0]) for part in self.layout.split(rows))
        if self.means is None:
            return LayerRows(keys, values)
        means = np.array(self.means[0, :, number * _MEANS : (number + 1) * _MEANS])
        return LayerRows(keys, values, means.reshape(len(means), -1))

    def put(self, blocks: list[LayerRows]) -> None:
        """Put rows and means before those that are there."""
        keys, values = (
            mx.array(np.concatenate(side, axis=1))[None]
            for side in ([block.keys for block in blocks], [block.values for block in blocks])
        )
        rows, means = self.layout.unsplit(keys, values), self.means
        self.arrays[self.body] = mx.concatenate([rows, self.rows], axis=2)
        if means is not None:
            first = [mx.array(block.mean) for block in blocks if block.mean is not None]
            first = [mean.reshape(1, -1, _MEANS, means.shape[3]) for mean in first]
            self.arrays[self.mean] = mx.concatenate([*first, means], axis=2)


def _paths(caches: list[Any]) -> list[str]:
    """Where the states of the layers that have packed rows in one piece are, in the list of the caches' states."""
    found: dict[str, Any] = {}
    for index, cache in enumerate(caches):
        if isinstance(cache, CacheList):
            found |= {f"{index}.{place}.0": part for place, part in enumerate(cache.caches)}
        else:
            found[str(index)] = cache
    return [path for path, cache in found.items() if type(cache) is CompressedKVCache and cache.body_tokens]


def _count(layers: list[_Layer]) -> int:
    return min((layer.rows.shape[2] for layer in layers), default=0) // ROWS


def _block(layers: list[_Layer], number: int) -> bytes:
    start = layers[0].spec.sinks + number * ROWS
    return to_bytes(Block(np.arange(start, start + ROWS), [layer.block(number) for layer in layers]))
