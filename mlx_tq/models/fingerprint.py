"""Fingerprints, which tell one model from another."""

import hashlib
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


def weights_fingerprint(model: Any) -> str:
    """Return 64 hex digits that differ between models of different weights, such as two finetunes of one.

    It covers every bit of every array, and reads all weights once.
    """
    digest = hashlib.sha256()
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    for name, weight in sorted(weights.items()):
        _add_array(digest, name, weight)
    return digest.hexdigest()


def exact_fingerprint(model: Any) -> str:
    """Return 64 hex digits of all weights, as `weights_fingerprint` does, and of the settings of every module."""
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
                _add_array(digest, key, value)
    return digest.hexdigest()


def _add_array(digest: "hashlib._Hash", name: str, array: mx.array) -> None:
    digest.update(f"{name} {array.shape} {array.dtype}".encode())
    flat = array.flatten()
    if array.ndim < 2 or flat.nbytes % (4 * array.shape[0]):
        parts = [flat.view(mx.uint8)]
    else:  # of a large array, the sums of its 32-bit words by column and by row
        words = flat.view(mx.uint32).reshape(array.shape[0], -1)
        parts = [words.sum(axis=0), words.sum(axis=1)]
    for part in parts:
        digest.update(np.array(part).tobytes())
