"""What a resume point is called: a digest of all that its bits depend on.

That is the model, how its caches are stored, what computes, and each step that was read, one digest after the other:
what a step sees unpacked depends on where steps begin, so the same tokens in other steps are another point.
"""

import hashlib
import json
import platform
from importlib.metadata import version
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_tq import __version__
from mlx_tq.kernels import backend, thresholds
from mlx_tq.models import exact_fingerprint
from mlx_tq.prompt_cache.plan import Plan

FORMAT = 1  # of the records; another one finds none of these


class Step(NamedTuple):
    """The end of a step: `stop` tokens have been read, and `key`, 64 hex digits, names what came of them."""

    stop: int
    key: str


def computing() -> list[str]:
    """What computes now; a kernel that fails on the way changes it. Another device or cut sums in another order."""
    cut = repr(thresholds.current())
    return [
        platform.machine(),
        str(mx.default_device()),
        str(mx.device_info().get("device_name")),
        backend.current(),
        cut,
    ]


def root(model: Any, plan: Plan, salt: str = "") -> bytes:
    """What the keys of all prompts begin with that this model reads in caches of this plan. Reads all weights.

    Who has another salt finds none of them.
    """
    digest = hashlib.sha256(exact_fingerprint(model).encode() + salt.encode())
    versions = (FORMAT, __version__, version("mlx"), version("mlx-lm"))
    stored = (plan.config.to_dict(), [layer.spec.to_dict() for layer in plan.layers], plan.classes)
    digest.update(json.dumps([computing(), versions, stored], sort_keys=True).encode())
    for layer in plan.layers:
        for array in layer.queries.arrays() if layer.queries else ():
            digest.update(np.array(array.astype(mx.float32)).tobytes())
    return digest.digest()


def steps(begin: bytes, segments: list[list[int]], size: int) -> list[Step]:
    """The ends of the steps in which a prompt is read: of `size` tokens each, but for the last of a segment.

    Args:
        begin: of `root`.
        segments: tokens that are read in steps, cut where a step ends in any case.
        size: tokens of a step.
    """
    found, digest, stop = [], begin, 0
    for ids in segments:
        for start in range(0, len(ids), size):
            part = np.array(ids[start : start + size], "<i8")
            digest, stop = hashlib.sha256(digest + part.tobytes()).digest(), stop + len(part)
            found.append(Step(stop, digest.hex()))
    return found
