"""Study layer by layer where codes and hidden states differ from those of a reference.

    python -m benchmarks.studies.layers --against float32

The reference is the uncompressed cache, another configuration, the reference implementation of the kernels, or the same
model in float32. Both prefill the same tokens.
"""

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from benchmarks.studies.flags import load_with_ids, open_results, run_study, study_parser
from mlx_tq.cache.layer import CompressedKVCache, cache_parts
from mlx_tq.cache.view import StepView
from mlx_tq.cli.loading import load_model
from mlx_tq.cli.options import Request
from mlx_tq.codec.formats import Codec, Encoded
from mlx_tq.codec.normalization import normalize
from mlx_tq.errors import ConfigError
from mlx_tq.evaluate.arms import Arm, arms_from_request, parse_arm, region_changes
from mlx_tq.evaluate.results import Columns
from mlx_tq.evaluate.teacher_forced import check_steps
from mlx_tq.kernels import backend
from mlx_tq.kernels.regions import Regions
from mlx_tq.prompt_cache.compressed import compressed_attention
from mlx_tq.prompt_cache.measurements import kl_divergence, log_probabilities


class Side(NamedTuple):
    """One of the two runs that are compared; `backend` None is that of the process."""

    model: Any
    arm: Arm
    backend: str | None = None


class LayerRow(NamedTuple):
    name: str
    layer: int
    cosine: float  # between the layer's output and that of the reference, mean over tokens
    least: float  # the minimum
    keys: float | None  # percentage of equal key codes; None if nothing is packed, or the reference has another format
    values: float | None
    first: int | None  # position of the first packed token with another code


class Predictions(NamedTuple):
    name: str
    tokens: int
    first: int | None  # position of the first token after which the most likely token differs
    top1: float  # percentage of tokens after which it is the same
    kld: float  # mean, in nats


def measure_layers(side: Side, reference: Side, ids: list[int], step: int) -> tuple[list[LayerRow], Predictions]:
    """Prefill `ids` on both sides. The codes of an fp16 reference are those of its vectors in the arm's formats."""
    sides = (reference, side)
    if any(each.arm.config.evict is not None for each in sides):
        raise ConfigError("layers are compared token by token, which eviction removes. Drop --kv-evict.")
    check_steps(side.model, len(ids), step, [each.arm for each in sides])
    caches = [each.arm.caches(each.model)() for each in sides]
    models = {id(each.model): each.model for each in sides}
    cosines: list[np.ndarray] = []  # of each step, [layers, L]
    agrees, divergences = [], []
    with ExitStack() as contexts:
        for model in models.values():
            contexts.enter_context(compressed_attention(model))
        captures = {key: contexts.enter_context(_captured_outputs(model)) for key, model in models.items()}
        for start in range(0, len(ids), step):
            logits, outputs = [], []
            for each, prompt_cache in zip(sides, caches, strict=True):
                capture = captures[id(each.model)]
                with nullcontext() if each.backend is None else backend.using(each.backend):
                    logits.append(log_probabilities(each.model, ids[start : start + step], prompt_cache))
                    mx.eval(logits, capture)
                outputs.append(capture[:])
                capture.clear()
            agrees.append(np.array(logits[0].argmax(axis=-1) == logits[1].argmax(axis=-1)))
            divergences.append(np.array(kl_divergence(*logits)))
            cosines.append(np.stack([_cosine(*pair) for pair in zip(*outputs, strict=True)]))
    same, codes, name = np.concatenate(agrees), dict(_compare_codes(*caches)), side.arm.name
    rows = [
        LayerRow(name, layer, float(cosine.mean()), float(cosine.min()), *codes.get(layer, (None, None, None)))
        for layer, cosine in enumerate(np.concatenate(cosines, axis=1))
    ]
    first = None if same.all() else int(same.argmin())
    return rows, Predictions(name, len(ids), first, 100 * float(same.mean()), float(np.concatenate(divergences).mean()))


@contextmanager
def _captured_outputs(model: Any) -> Iterator[list[mx.array]]:
    """Yield a list to which each layer appends its output [1, L, hidden]; the modules stay in place."""
    outputs: list[mx.array] = []
    classes = {id(layer): (layer, type(layer)) for layer in model.layers}
    for layer, original in classes.values():

        def call(self: Any, *args: Any, original: type[Any] = original, **options: Any) -> Any:
            output = original.__call__(self, *args, **options)
            outputs.append(output[0] if isinstance(output, tuple) else output)
            return output

        object.__setattr__(layer, "__class__", type(original.__name__, (original,), {"__call__": call}))
    try:
        yield outputs
    finally:
        for layer, original in classes.values():
            object.__setattr__(layer, "__class__", original)


def _cosine(a: mx.array, b: mx.array) -> np.ndarray:
    """Return the cosine of each token, float64 [L]: fp32 does not tell 1 from 1 - 1e-7."""
    x, y = (np.array(array[0].astype(mx.float32), np.float64) for array in (a, b))
    return np.asarray((x * y).sum(axis=-1) / np.maximum(np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1), 1e-30))


def _compare_codes(references: list[Any], caches: list[Any]) -> Iterator[tuple[int, tuple[Any, Any, int | None]]]:
    """Yield layer, percentages of equal key and value codes, and the first position with another code."""
    for layer, pair in enumerate(zip(references, caches, strict=True)):
        for reference, cache in zip(*(cache_parts([entry]) for entry in pair), strict=True):
            if not isinstance(cache, CompressedKVCache) or not cache.packed_tokens:
                continue
            view, shares, positions = _regions(cache), {"key": None, "value": None}, []
            for side in shares:
                expected = _expected_codes(view, reference, cache, side)
                if expected is not None:
                    equal = _stored_codes(view, side) == expected
                    shares[side] = 100 * float(equal.mean())
                    positions += np.flatnonzero(~equal.all(axis=(0, 1, 3))).tolist()
            first = _packed_start(view, cache) + min(positions) if positions else None
            yield layer, (shares["key"], shares["value"], first)


def _regions(cache: CompressedKVCache) -> Regions:
    view = cache.keys_and_values()[0].view
    assert isinstance(view, StepView)
    return view.regions


def _packed_start(view: Regions, cache: CompressedKVCache) -> int:
    # behind the rows in the second format of a mixed cache
    return cache.spec.sinks + cache.packed_tokens - view.packed_tokens


def _expected_codes(view: Regions, reference: Any, cache: CompressedKVCache, side: str) -> np.ndarray | None:
    """Return the reference's codes of the same tokens, or None if it stores another format."""
    if isinstance(reference, CompressedKVCache):
        other = _regions(reference)
        alike = getattr(cache.spec, side) == getattr(reference.spec, side) and other.packed_tokens == view.packed_tokens
        return _stored_codes(other, side) if alike else None
    codec: Codec = getattr(view.layout, side)
    start = _packed_start(view, cache)
    vectors = getattr(reference, f"{side}s")[:, :, start : start + view.packed_tokens]
    if side == "key" and view.normalization is not None:
        vectors = normalize(vectors, view.normalization, codec.rotation)
    return _decoded(codec, codec.encode(vectors))


def _stored_codes(view: Regions, side: str) -> np.ndarray:
    return _decoded(getattr(view.layout, side), getattr(view.layout, f"{side}s")(view.rows()))


def _decoded(codec: Codec, encoded: Encoded) -> np.ndarray:
    """Return what each code stands for, without a scale that is stored separately: fp32 [B, H, S, D]."""
    return np.array(mx.concatenate(codec.decode_planes(encoded.codes), axis=-1))


def _or_dash(name: str, style: str) -> Any:
    return lambda row: "-" if row[name] is None else format(row[name], style)


COLUMNS: Columns = {
    "cache": lambda row: f"{row['name']}, layer {row['layer']}",
    "cosine": _or_dash("cosine", ".6f"),
    "least": _or_dash("least", ".6f"),
    "equal key codes %": _or_dash("keys", ".2f"),
    "value codes %": _or_dash("values", ".2f"),
    "first other code": _or_dash("first", "d"),
}


def run(args: argparse.Namespace) -> None:
    request = Request.from_args(args)
    arms = arms_from_request(request)
    results = open_results(args, "layers", ("length", "step", "against", "backend"), arms)
    model, ids = load_with_ids(args, *(arm.config for arm in arms))
    lines = []
    for arm in arms:
        if args.against == "reference":
            reference = Side(model, arm, "reference")
        elif args.against == "float32":
            float32_model, _ = load_model(args)
            float32_model.set_dtype(mx.float32)
            reference = Side(float32_model, arm)
        else:
            reference = Side(model, parse_arm(args.against, **region_changes(request)))
        rows, predictions = measure_layers(Side(model, arm), reference, ids, args.step)
        for row in rows:
            results.add(f"{row.name} {row.layer}", row._asdict())
        results.add(predictions.name, predictions._asdict())
        lines.append(f"{arm.name}: {predictions.top1:.2f} % equal next tokens; KLD {predictions.kld:.6f}")
    rows_of_layers = [row for row in results.rows.values() if "layer" in row]
    results.show(f"Layers against {args.against}", COLUMNS, rows_of_layers, "\n".join(lines))


if __name__ == "__main__":
    parser = study_parser("Study layer by layer where codes and hidden states differ.", 512, "balanced")
    parser.add_argument("--step", type=int, default=128, metavar="N", help="tokens per prefill step")
    against = "off (fp16), a profile or a pair; reference (the reference implementation), or float32 (the model in it)"
    parser.add_argument("--against", default="off", metavar="WHAT", help=against)
    run_study("layers", parser, run)
