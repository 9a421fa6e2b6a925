"""Every pair of key and value formats: bytes, error of what is stored, and what that does to predictions."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_tq.codec.formats import format_names, get_format
from mlx_tq.errors import ConfigError
from mlx_tq.evaluate.arms import OFF, Arm, parse_arm
from mlx_tq.evaluate.divergence import summarize_divergence
from mlx_tq.evaluate.needle import VOID, measure_needles
from mlx_tq.evaluate.passes import Advance, read_side_by_side, why_unpacked
from mlx_tq.evaluate.perplexity import summarize_perplexity
from mlx_tq.evaluate.recording import Attended, record
from mlx_tq.prompt_cache.build import make_cache
from mlx_tq.prompt_cache.compressed import plan_caches

TOGETHER = 4  # pairs that read beside one fp16 cache
QUERIES = 64  # the last tokens of the recorded text, whose attention is compared


@dataclass(frozen=True)
class FormatRow:
    """What one pair of formats costs.

    Attributes:
        name: KEY/VALUE.
        nbytes: of a packed token in all layers, measured from arrays.
        ratio: how many times smaller than the model's own type.
        key_error: squared error of stored keys over their squared norm, mean over layers.
        value_error: of values.
        cosine: between attention's outputs over the compressed and the fp16 cache, for the same queries, mean over
            layers and heads.
        kld: mean KL divergence from the fp16 cache's predictions in nats, and its standard error.
        top1: percent of tokens with the same most likely next token.
        ppl: perplexity.
        delta: its change against the fp16 cache in percent, and the standard error of that.
        packed: share of the attended tokens that was packed, where predictions were compared.
        found: of the needles asked for, how many were found.
        asked: needles that the fp16 cache finds; 0 where none was asked for.
    """

    name: str
    nbytes: float
    ratio: float
    key_error: float
    value_error: float
    cosine: float
    kld: float
    kld_error: float
    top1: float
    ppl: float
    delta: float
    delta_error: float
    packed: float
    found: int = 0
    asked: int = 0


def sensible_pairs() -> list[str]:
    """Each format on both sides, under keys of q8, and over values of tq4."""
    names = format_names()
    found = [pair for name in names for pair in ((name, name), ("q8", name), (name, "tq4"))]
    usable = [(key, value) for key, value in found if not get_format(value).keys_only]
    return [f"{key}/{value}" for key, value in sorted(set(usable), key=lambda pair: [*map(names.index, pair)])]


def pairs(keys: str | None, values: str | None, listed: str | None = None, **changes: Any) -> list[Arm]:
    """Pairs of formats, written as in `parse_arm`: those listed, or all of the named keys and values.

    Args:
        keys: formats separated by commas, tq4 where only `values` are given.
        values: the same.
        listed: pairs separated by commas. Without any of the three: `sensible_pairs`.
        changes: other fields of the configuration.

    Raises:
        ConfigError: an unknown format or scale rule, or both ways of choosing.
    """
    if listed and (keys or values):
        raise ConfigError("--pairs and --keys or --values both choose formats. Drop one of them.")
    if keys or values:
        names = [f"{key}/{value}" for key, value in product(*((side or "tq4").split(",") for side in (keys, values)))]
    else:
        names = listed.split(",") if listed else sensible_pairs()
    return [parse_arm(name, **changes) for name in names]


def measure_formats(
    model: Any, chunks: list[list[int]], arms: Sequence[Arm], step: int = 512, advance: Advance = lambda tokens: None
) -> Iterator[FormatRow]:
    """Measure each pair, a few at a time, so that results come while the rest is measured.

    Raises:
        ConfigError: the reading would measure nothing; see `passes.check_reading`.
    """
    if not arms:
        return
    recorded = record(model, chunks[0], QUERIES)
    for start in range(0, len(arms), TOGETHER):
        members = arms[start : start + TOGETHER]
        reference, *scores = read_side_by_side(model, chunks, members, step, advance)
        for arm, found in zip(members, scores, strict=True):
            stored = _measure_storage(model, arm, recorded)
            ppl = summarize_perplexity(arm.name, found, reference.nll)
            kld = summarize_divergence(arm.name, found)
            yield FormatRow(
                name=arm.name,
                nbytes=stored.nbytes,
                ratio=stored.full_nbytes / stored.nbytes,
                key_error=stored.key_error,
                value_error=stored.value_error,
                cosine=stored.cosine,
                kld=kld.kld,
                kld_error=kld.kld_error,
                top1=kld.top1,
                ppl=ppl.ppl,
                delta=ppl.delta,
                delta_error=ppl.delta_error,
                packed=ppl.packed,
            )


def find_needles(
    model: Any, tokenizer: Any, text: str, arms: Sequence[Arm], *, length: int, seeds: int, step: int
) -> Iterator[tuple[str, dict[str, int]]]:
    """The name of each pair with how many needles it found, and of how many that the fp16 cache finds.

    Args:
        model: to ask.
        tokenizer: of the model.
        text: what surrounds the needles.
        arms: to ask, which have the same sinks and window.
        length: tokens of each prompt.
        seeds: needles at each of three depths.
        step: tokens read at a time.
    """
    known: dict[str, dict[str, Any]] = {}  # the fp16 cache answers once for all
    for arm in arms:
        cells = measure_needles(
            model, tokenizer, text, [arm], lengths=[length], seeds=range(seeds), step=step, known=known.get
        )
        known |= {cell.key: asdict(cell) for cell in cells if cell.name == OFF.name}
        verdicts = [cell.verdict for cell in cells if cell.name == arm.name and cell.verdict != VOID]
        yield arm.name, {"found": verdicts.count("PASS"), "asked": len(verdicts)}


@dataclass(frozen=True)
class _Storage:
    """Bytes of a token and errors over all layers."""

    nbytes: float
    full_nbytes: float
    key_error: float
    value_error: float
    cosine: float


def _measure_storage(model: Any, arm: Arm, recorded: list[Attended]) -> _Storage:
    """Put recorded keys and values through the cache of each layer, and attend with the recorded queries."""
    full = sum(_token_bytes(layer.keys, layer.values) for layer in recorded)
    if arm.config.is_off:
        return _Storage(full, full, 0.0, 0.0, 1.0)
    nbytes, rows = 0.0, []
    for planned, layer in zip(plan_caches(model, arm.config).layers, recorded, strict=True):
        cache = make_cache(planned.spec)
        past = layer.keys.shape[2] - QUERIES
        reading = cache.append(layer.keys[:, :, :past], layer.values[:, :, :past])
        reading.attend(layer.earlier, layer.scale, "causal", layer.sinks)  # keys are normalized by queries
        if not cache.body_tokens:
            raise ConfigError(
                f"{past} tokens with sinks {planned.spec.sinks} and window {planned.spec.window} pack none. Take a "
                f"longer --length, or a smaller --kv-sinks or --kv-window.{why_unpacked(planned.spec, past)}"
            )
        nbytes += cache.body_nbytes / (layer.keys.shape[0] * cache.body_tokens)
        body = slice(planned.spec.sinks, planned.spec.sinks + cache.body_tokens)
        view = cache.append(layer.keys[:, :, past:], layer.values[:, :, past:])
        output = view.attend(layer.queries, layer.scale, layer.mask, layer.sinks)
        keys, values = (handle.materialize() for handle in cache.keys_and_values())
        errors = [
            _relative_error(keys[:, :, body], layer.keys[:, :, body]),
            _relative_error(values[:, :, body], layer.values[:, :, body]),
            _cosine(output, layer.output),
        ]
        rows.append([float(error) for error in errors])
    key_error, value_error, cosine = np.mean(rows, axis=0)
    return _Storage(nbytes, full, float(key_error), float(value_error), float(cosine))


def _token_bytes(keys: mx.array, values: mx.array) -> float:
    return (keys.nbytes + values.nbytes) / (keys.shape[0] * keys.shape[2])


def _relative_error(found: mx.array, exact: mx.array) -> mx.array:
    found, exact = found.astype(mx.float32), exact.astype(mx.float32)
    return mx.square(found - exact).sum() / mx.square(exact).sum()


def _cosine(found: mx.array, exact: mx.array) -> mx.array:
    found, exact = found.astype(mx.float32), exact.astype(mx.float32)
    norms = mx.linalg.norm(found, axis=-1) * mx.linalg.norm(exact, axis=-1)
    return ((found * exact).sum(axis=-1) / mx.maximum(norms, 1e-12)).mean()
