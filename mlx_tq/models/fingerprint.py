"""Fingerprints, which tell one model from another."""

import hashlib
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

WHOLE = "_mlx_tq_whole_fingerprint"  # the attribute of a rank's part of a model


def fingerprint(model: Any) -> str:
    """Return 16 hex digits of names, shapes and types of all weights, and of the values of the one-dimensional ones.

    A rank's part of a model has the fingerprint of the whole.
    """
    if (whole := getattr(model, WHOLE, None)) is not None:
        return str(whole)
    digest = hashlib.sha256()
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    for name, weight in sorted(weights.items()):
        digest.update(f"{name} {weight.shape} {weight.dtype}".encode())
        if weight.ndim == 1:
            digest.update(np.array(weight.astype(mx.float32)).tobytes())
    return digest.hexdigest()[:16]


def exact_fingerprint(model: Any) -> str:
    """Return 64 hex digits that differ between models which compute differently, such as two finetunes of one.

    It covers every bit of every array and the settings of every module, and reads all weights once.
    """
    digest = hashlib.sha256()
    for name, module in sorted(model.named_modules()):
        settings = {
            key: value
            for key, value in sorted(vars(module).items())
            if not key.startswith("_")
            and (value is None or isinstance(value, int | float | str) or (is_dataclass(value) and not callable(value)))
        }
        digest.update(f"{name} {type(module).__module__}.{type(module).__qualname__} {settings}".encode())
        for key, value in sorted(module.items()):
            if isinstance(value, mx.array):
                digest.update(f"{key} {value.shape} {value.dtype}".encode())
                for part in _hashed_parts(value):
                    digest.update(np.array(part).tobytes())
    return digest.hexdigest()


def _hashed_parts(array: mx.array) -> Iterator[mx.array]:
    """Yield the bytes of a small array, or the sums of a large one's 32-bit words by column and by row."""
    flat = array.flatten()
    if array.ndim < 2 or flat.nbytes % (4 * array.shape[0]):
        yield flat.view(mx.uint8)
        return
    words = flat.view(mx.uint32).reshape(array.shape[0], -1)
    yield from (words.sum(axis=0), words.sum(axis=1))
