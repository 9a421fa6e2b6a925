"""Layer by layer: where a cache's codes and a model's hidden states leave those of a reference.

The reference is the fp16 cache, another configuration, the same on mlx's own operations instead of kernels, or the same
model in float32. Both read the same tokens, so that the first token that is predicted otherwise can be named.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_tq.cache.handles import StepView
from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.codec.formats import Codec, Encoded
from mlx_tq.codec.normalization import normalize
from mlx_tq.errors import ConfigError
from mlx_tq.evaluate.arms import Arm
from mlx_tq.evaluate.passes import Advance, check_reading, steps
from mlx_tq.kernels import backend
from mlx_tq.kernels.regions import Regions
from mlx_tq.prompt_cache.compressed import compressed
from mlx_tq.prompt_cache.passes import cache_parts
from mlx_tq.prompt_cache.predictions import kl_divergence, log_probabilities


@dataclass(frozen=True)
class Side:
    """One of the two runs that are compared.

    Attributes:
        model: to run.
        arm: how its tokens are stored.
        backend: what computes, of `backend.BACKENDS`; None is what was chosen for the process.
    """

    model: Any
    arm: Arm
    backend: str | None = None

    def computing(self) -> AbstractContextManager[None]:
        """The implementation, until the context ends."""
        return nullcontext() if self.backend is None else backend.using(self.backend)


@dataclass(frozen=True)
class LayerRow:
    """What differs in one layer.

    Attributes:
        name: of the arm.
        layer: its number.
        cosine: between its output and the reference's, mean over tokens.
        least: the smallest of them.
        keys: share of equal codes of packed keys, in percent. None where the layer packs nothing, or the reference
            stores another format.
        values: the same of values.
        first: position of the first packed token with another code, or None.
    """

    name: str
    layer: int
    cosine: float
    least: float
    keys: float | None
    values: float | None
    first: int | None


@dataclass(frozen=True)
class Predictions:
    """What both predict after each token.

    Attributes:
        name: of the arm.
        tokens: read.
        first: position of the first token after which they have another most likely token, or None.
        top1: share of the tokens after which it is the same, in percent.
        kld: mean KL divergence from the reference's predictions in nats.
    """

    name: str
    tokens: int
    first: int | None
    top1: float
    kld: float


def measure_layers(
    side: Side, reference: Side, ids: list[int], step: int, advance: Advance = lambda tokens: None
) -> tuple[list[LayerRow], Predictions]:
    """Read `ids` in steps on both sides.

    The codes of an fp16 reference are those that its keys and values would have in the arm's formats.

    Raises:
        ConfigError: an arm that evicts, or a reading that never meets a packed token.
    """
    sides = (reference, side)
    if any(each.arm.config.evict is not None for each in sides):
        raise ConfigError("layers are compared token by token, which eviction removes. Drop --kv-evict.")
    check_reading(side.model, len(ids), step, [each.arm for each in sides])
    name = side.arm.name
    caches = [each.arm.caches(each.model)() for each in sides]
    models = {id(each.model): each.model for each in sides}
    cosines: list[np.ndarray] = []  # of each step, [layers, L]
    agrees, divergences = [], []
    with ExitStack() as contexts:
        for model in models.values():
            contexts.enter_context(compressed(model))
        listeners = {key: contexts.enter_context(_listening(model)) for key, model in models.items()}
        for start, stop in steps(len(ids), step):
            logits, outputs = [], []
            for each, own in zip(sides, caches, strict=True):
                heard = listeners[id(each.model)]
                with each.computing():
                    logits.append(log_probabilities(each.model, ids[start:stop], own))
                    mx.eval(logits, heard)
                outputs.append(heard[:])
                heard.clear()
                advance(stop - start)
            agrees.append(np.array(logits[0].argmax(axis=-1) == logits[1].argmax(axis=-1)))
            divergences.append(np.array(kl_divergence(*logits)))
            cosines.append(np.stack([_cosine(*pair) for pair in zip(*outputs, strict=True)]))
    cosine, same = np.concatenate(cosines, axis=1), np.concatenate(agrees)
    stored = dict(_stored(*caches))
    rows = [
        LayerRow(name, layer, float(each.mean()), float(each.min()), *stored.get(layer, (None, None, None)))
        for layer, each in enumerate(cosine)
    ]
    first = None if same.all() else int(same.argmin())
    return rows, Predictions(name, len(ids), first, 100 * float(same.mean()), float(np.concatenate(divergences).mean()))


@contextmanager
def _listening(model: Any) -> Iterator[list[mx.array]]:
    """Yields a list to which each layer appends its output [1, L, hidden] until the context ends."""
    found: list[mx.array] = []
    own = {id(layer): (layer, type(layer)) for layer in model.layers}
    for layer, kind in own.values():  # the module itself stays in its place, with its weights
        object.__setattr__(layer, "__class__", _listening_kind(kind, found))
    try:
        yield found
    finally:
        for layer, kind in own.values():
            object.__setattr__(layer, "__class__", kind)


def _listening_kind(kind: type[Any], found: list[mx.array]) -> type[Any]:
    """A kind of layer that appends its outputs to `found`."""

    def call(self: Any, *args: Any, **options: Any) -> Any:
        output = kind.__call__(self, *args, **options)
        found.append(output[0] if isinstance(output, tuple) else output)
        return output

    return type(kind.__name__, (kind,), {"__call__": call})


def _cosine(a: mx.array, b: mx.array) -> np.ndarray:
    """Of each token, float64 [L]: fp32 would not tell 1 from 1 - 1e-7."""
    x, y = (np.array(each[0].astype(mx.float32), np.float64) for each in (a, b))
    return np.asarray((x * y).sum(axis=-1) / np.maximum(np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1), 1e-30))


def _stored(wanted: list[Any], found: list[Any]) -> Iterator[tuple[int, tuple[float | None, float | None, int | None]]]:
    """By layer: percent of equal codes of keys and of values, and the first position with another."""
    for layer, (reference, cache) in enumerate(zip(wanted, found, strict=True)):
        for other, own in zip(cache_parts([reference]), cache_parts([cache]), strict=True):
            if isinstance(own, CompressedKVCache) and own.body_tokens:
                yield layer, _compare(_view(own), other, own)


def _view(cache: CompressedKVCache) -> Regions:
    view = cache.keys_and_values()[0].view
    assert isinstance(view, StepView)  # noqa: S101  of a single sequence
    return view.regions


def _compare(view: Regions, reference: Any, cache: CompressedKVCache) -> tuple[float | None, float | None, int | None]:
    shares: dict[str, float | None] = {"key": None, "value": None}
    positions: list[int] = []
    for side in shares:
        wanted = _wanted_codes(view, reference, cache, side)
        if wanted is not None:
            equal = _stored_codes(view, side) == wanted
            shares[side] = 100 * float(equal.mean())
            positions += np.flatnonzero(~equal.all(axis=(0, 1, 3))).tolist()
    return shares["key"], shares["value"], _start(view, cache) + min(positions) if positions else None


def _wanted_codes(view: Regions, reference: Any, cache: CompressedKVCache, side: str) -> np.ndarray | None:
    """The reference's codes of the same tokens, or None where it stores another format."""
    if isinstance(reference, CompressedKVCache):
        other = _view(reference)
        alike = getattr(cache.spec, side) == getattr(reference.spec, side) and other.body == view.body
        return _stored_codes(other, side) if alike else None
    codec: Codec = getattr(view.layout, side)
    full: mx.array = getattr(reference, f"{side}s")
    start = _start(view, cache)
    body = full[:, :, start : start + view.body]
    if side == "key" and view.normalization is not None:
        body = normalize(body, view.normalization, codec.rotation)
    return _codes(codec, codec.encode(body))


def _start(view: Regions, cache: CompressedKVCache) -> int:
    """The position of the body's first token, behind the cold ones of a mixed cache."""
    return cache.spec.sinks + cache.body_tokens - view.body


def _stored_codes(view: Regions, side: str) -> np.ndarray:
    return _codes(getattr(view.layout, side), getattr(view.layout, f"{side}s")(view.packed()))


def _codes(codec: Codec, encoded: Encoded) -> np.ndarray:
    """What each code stands for, without a scale that is stored apart: fp32 [B, H, S, D]."""
    return np.array(mx.concatenate(codec.decode_planes(encoded.codes), axis=-1))
