"""Decode steps and prefill of whole models."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step

from benchmarks.gpu.models import (
    PROFILE_ARMS,
    QUANTIZED,
    SHAPES,
    Caches,
    ModelArm,
    ShapedModel,
    append_random,
    fill_caches,
    is_growing,
    make_caches,
    make_model,
)
from benchmarks.gpu.setting import Cells, Setting
from mlx_tq.bench.timing import compare_arms
from mlx_tq.errors import KernelUnavailableError
from mlx_tq.prompt_cache.compressed import compressed_attention

DECODE_TOKENS, PREFILL_TOKENS = (4096, 32768, 131072), (4096, 16384)
DRY_TOKENS = (80,)
PREFILL_STEP, PREFILL_LAYERS = 2048, 4
STEPS, LEAST_STEPS, STEPS_SECONDS = 32, 8, 1.0  # decoded tokens of a measurement: at most, at least, and in this time
FP16 = ModelArm("fp16")
NO_ROOM = {"skipped": "does not fit in memory"}


def decode_cells(setting: Setting) -> Cells:
    for tokens in DRY_TOKENS if setting.dry else DECODE_TOKENS:
        for name in SHAPES:
            yield f"{name}, {tokens} tokens", partial(measure_decode, name, setting, tokens)


def prefill_cells(setting: Setting) -> Cells:
    for tokens in DRY_TOKENS if setting.dry else PREFILL_TOKENS:
        for name in SHAPES:
            yield f"{name}, {tokens} tokens", partial(measure_prefill, name, setting, tokens)


def measure_decode(name: str, setting: Setting, tokens: int) -> dict[str, Any]:
    """Return the tokens per second of each kind of cache, and the bytes that a step reads."""
    shaped = make_model(name, setting, tokens)
    if shaped is None:
        return NO_ROOM
    arms: dict[str, Callable[[], float]] = {}
    nbytes, skipped = {}, {}
    with compressed_attention(shaped.model):
        for arm in (FP16, *QUANTIZED, *PROFILE_ARMS):
            try:
                caches = make_caches(shaped, arm)
                fill_caches(shaped, caches, tokens)
                seconds = _decode(shaped, caches, 4)
            except (RuntimeError, ValueError, KernelUnavailableError) as error:
                skipped[arm.name] = str(error)[:400]
                continue
            steps = 4 if setting.dry else max(LEAST_STEPS, min(STEPS, int(STEPS_SECONDS / seconds)))
            arms[arm.name] = partial(_decode, shaped, caches, steps)
            nbytes[arm.name] = sum(cache.nbytes for cache in caches if is_growing(cache))
        if not arms:
            raise RuntimeError(f"no kind of cache could be filled: {skipped}")
        compared = compare_arms(arms, setting.rounds)
    base = next(iter(nbytes.values()))
    rows = {
        arm: {
            **times._asdict(),
            "kv_nbytes": nbytes[arm],
            "bound": (shaped.nbytes + base) / (shaped.nbytes + nbytes[arm]),  # times as fast, if bytes alone decided
        }
        for arm, times in compared.arms.items()
    }
    return _about(shaped, tokens) | {**compared._asdict(), "arms": rows, "skipped_arms": skipped}


def _decode(shaped: ShapedModel, caches: Caches, steps: int) -> float:
    """Return the seconds of a step of mlx-lm's own loop, which queues each step before the last one has ended."""
    generated = generate_step(mx.array([1]), shaped.model, prompt_cache=caches, max_tokens=steps + 1)
    next(generated)
    started = time.perf_counter()
    for _ in generated:
        pass
    return (time.perf_counter() - started) / steps


def measure_prefill(name: str, setting: Setting, tokens: int) -> dict[str, Any]:
    """Return seconds and peak memory of a prefill with each profile, and the share of storing keys and values."""
    shaped = make_model(name, setting, tokens, PREFILL_LAYERS)
    if shaped is None:
        return NO_ROOM
    peaks: dict[str, int] = {}
    arms = {arm.name: partial(_prefill, shaped, arm, tokens, peaks) for arm in (FP16, *PROFILE_ARMS)}
    with compressed_attention(shaped.model):
        for run in arms.values():
            run(min(tokens, PREFILL_STEP))  # compiles
        compared = compare_arms(arms, 1)
        rows = {}
        for arm in (FP16, *PROFILE_ARMS):
            times = compared.arms[arm.name]
            share = shaped.attending_layers * _store(shaped, arm, tokens) / times.seconds[0]
            rows[arm.name] = {**times._asdict(), "peak_nbytes": peaks[arm.name], "store_share": share}
    return _about(shaped, tokens) | {**compared._asdict(), "arms": rows}


def _prefill(shaped: ShapedModel, arm: ModelArm, tokens: int, peaks: dict[str, int], limit: int | None = None) -> float:
    caches, stop = make_caches(shaped, arm), limit or tokens
    prompt = mx.arange(stop)[None] % shaped.config["vocab_size"]
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    started = time.perf_counter()
    for start in range(0, stop, PREFILL_STEP):
        mx.eval(shaped.model(prompt[:, start : start + PREFILL_STEP], cache=caches))
        mx.eval([cache.state for cache in caches])
        mx.clear_cache()
    seconds = time.perf_counter() - started
    peaks[arm.name] = mx.get_peak_memory()
    return seconds


def _store(shaped: ShapedModel, arm: ModelArm, tokens: int) -> float:
    """Return the seconds that one layer takes to store keys and values, random ones made on the way included."""
    cache = next(cache for cache in make_caches(shaped, arm) if is_growing(cache))
    started = time.perf_counter()
    append_random(shaped, cache, tokens, PREFILL_STEP)
    return time.perf_counter() - started


def _about(shaped: ShapedModel, tokens: int) -> dict[str, Any]:
    layers = {"layers": shaped.layers, "attending_layers": shaped.attending_layers}
    return {"tokens": tokens, **layers, "weights_nbytes": shaped.nbytes}
