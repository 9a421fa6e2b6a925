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
                flat = value.flatten()
                if value.ndim < 2 or flat.nbytes % (4 * value.shape[0]):
                    parts = [flat.view(mx.uint8)]
                else:  # of a large array, the sums of its 32-bit words by column and by row
                    words = flat.view(mx.uint32).reshape(value.shape[0], -1)
                    parts = [words.sum(axis=0), words.sum(axis=1)]
                for part in parts:
                    digest.update(np.array(part).tobytes())
    return digest.hexdigest()
