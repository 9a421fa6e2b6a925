"""What tells one model from another."""

import hashlib
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlx_tq.models.shard import shard_of


def fingerprint(model: Any) -> str:
    """16 hex digits that differ between models: names, shapes and types of all weights, values of the small ones.

    A rank's part of a model has that of the whole.
    """
    if (shard := shard_of(model)) is not None:
        return shard.fingerprint
    digest = hashlib.sha256()
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    for name, weight in sorted(weights.items()):
        digest.update(f"{name} {weight.shape} {weight.dtype}".encode())
        if weight.ndim == 1:
            digest.update(np.array(weight.astype(mx.float32)).tobytes())
    return digest.hexdigest()[:16]


def exact_fingerprint(model: Any) -> str:
    """64 hex digits that differ between models which compute differently, such as two that were tuned from one.

    Every bit of every array counts, and every number, word and configuration of every module. Reads all weights once.
    """
    digest = hashlib.sha256()
    for name, module in sorted(model.named_modules()):
        settings = {key: value for key, value in sorted(vars(module).items()) if _is_setting(key, value)}
        digest.update(f"{name} {type(module).__module__}.{type(module).__qualname__} {settings}".encode())
        for key, value in sorted(module.items()):
            if isinstance(value, mx.array):
                digest.update(f"{key} {value.shape} {value.dtype}".encode())
                for part in _told(value):
                    digest.update(np.array(part).tobytes())
    return digest.hexdigest()


def _is_setting(key: str, value: Any) -> bool:
    plain = value is None or isinstance(value, int | float | str) or (is_dataclass(value) and not callable(value))
    return plain and not key.startswith("_")


def _told(array: mx.array) -> Iterator[mx.array]:
    """What tells an array from others: itself, or of a large one the sums of its 32-bit words by row and by column."""
    flat = array.flatten()
    if array.ndim < 2 or flat.nbytes % (4 * array.shape[0]):
        yield flat.view(mx.uint8)
        return
    words = flat.view(mx.uint32).reshape(array.shape[0], -1)
    yield from (words.sum(axis=0), words.sum(axis=1))
