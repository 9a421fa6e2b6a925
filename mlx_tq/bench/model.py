"""Measure the speed and memory of a whole model on each kind of cache, in one run.

The caches take turns, several rounds, so that what slows the machine down slows all of them down. Prefill and decoding
go through mlx-lm's own `generate_step`; a batch is made of copies of the prefilled cache, merged as a server merges.
"""

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import QuantizedKVCache

from mlx_tq.cache.layer import cache_parts
from mlx_tq.config import KVConfig
from mlx_tq.integration.probe import native_caches
from mlx_tq.prompt_cache.compressed import compressed_attention, make_prompt_cache

Caches = list[Any]
Measured = dict[str, float]  # of one round


@dataclass(frozen=True)
class BenchedCache:
    """One kind of cache: a compressed one, mlx-lm's own, or mlx-lm's quantized one (`kv_bits`)."""

    name: str
    config: KVConfig | None = None
    kv_bits: int | None = None

    def make(self, model: Any) -> Caches:
        return native_caches(model) if self.config is None else make_prompt_cache(model, self.config)


@dataclass(frozen=True)
class Figure:
    """Medians of the rounds for one cache at one type, context and batch size."""

    arm: str  # name of the cache
    dtype: str
    tokens: int  # of the prompt
    batch: int
    prefill_tps: float | None  # tokens per second; None for a batch, whose rows are copies
    first_token: float | None  # seconds; None likewise
    decode_tps: float  # tokens per second of all rows; low and high are the extremes of the rounds
    low: float
    high: float
    kv_nbytes: int  # of the caches' arrays
    active_nbytes: int  # in use after decoding, beyond those in use before the prompt
    peak_nbytes: int  # weights included


def measure_model(
    model: Any,
    prompt: list[int],
    caches: list[BenchedCache],
    *,
    dtype: str,
    batches: list[int],
    max_tokens: int,
    rounds: int,
    step: int,
    skipped: dict[str, str],
    advance: Callable[[int], None] = lambda done: None,
) -> list[Figure]:
    """Run every cache on one prompt.

    mlx has no kernel for mlx-lm's quantized cache of some shapes on some backends: `skipped` receives those caches with
    mlx's message. Caches that mlx-lm cannot batch have figures of one row only.
    """
    measured: dict[tuple[str, int], list[Measured]] = defaultdict(list)
    for cache in caches * rounds:
        try:
            if cache.name not in skipped:
                with compressed_attention(model):
                    for batch, values in _run(model, prompt, cache, batches, max_tokens, step):
                        measured[cache.name, batch].append(values)
        except RuntimeError as error:
            if cache.kv_bits is None:
                raise
            skipped[cache.name] = str(error)
        advance(1)
    figures = []
    for (name, batch), values_of_rounds in measured.items():
        if name not in skipped:
            first = statistics.median(values["first_token"] for values in values_of_rounds) if batch == 1 else None
            prefill = None if first is None else len(prompt) / first
            rates = [values["rate"] for values in values_of_rounds]
            speeds = prefill, first, statistics.median(rates), min(rates), max(rates)
            nbytes = (int(max(values[key] for values in values_of_rounds)) for key in ("kv", "active", "peak"))
            figures.append(Figure(name, dtype, len(prompt), batch, *speeds, *nbytes))
    return figures


def _run(
    model: Any, prompt: list[int], cache: BenchedCache, batches: list[int], max_tokens: int, step: int
) -> Iterator[tuple[int, Measured]]:
    """Prefill once, decode alone, then decode in each batch; yields the batch and what was measured."""
    caches = cache.make(model)
    with _measured_memory(caches) as measured:
        options = {"max_tokens": max_tokens, "prompt_cache": caches, "prefill_step_size": step}
        options |= {} if cache.kv_bits is None else {"kv_bits": cache.kv_bits, "quantized_kv_start": 0}
        started = time.perf_counter()
        tokens = generate_step(mx.array(prompt), model, **options)
        token, _ = next(tokens)
        first = time.perf_counter()
        for token, _ in tokens:  # noqa: B007  the last one continues as a batch
            pass
        ended = time.perf_counter()
    yield 1, measured | {"first_token": first - started, "rate": (max_tokens - 1) / (ended - first)}
    if any(isinstance(part, QuantizedKVCache) for part in cache_parts(caches)):
        return  # mlx-lm cannot merge these
    for batch in batches:
        if batch > 1:
            yield batch, _decode_batch(model, caches, int(token), batch, max_tokens)


def _decode_batch(model: Any, caches: Caches, token: int, batch: int, max_tokens: int) -> Measured:
    """Decode copies of a sequence together; like mlx-lm, it starts each step before the previous one has ended."""
    merged: Caches = []
    with _measured_memory(merged) as measured:
        merged += [cache.merge([cache] * batch) for cache in caches]
        tokens = model(mx.full((batch, 1), token), cache=merged)[:, -1:].argmax(-1)
        mx.eval(tokens)  # the time to merge does not count
        started = time.perf_counter()
        for _ in range(max_tokens):
            following = model(tokens, cache=merged)[:, -1:].argmax(-1)
            mx.async_eval(following)  # type: ignore[no-untyped-call]
            mx.eval(tokens)
            tokens = following
        mx.eval(tokens)
        ended = time.perf_counter()
    return measured | {"rate": batch * max_tokens / (ended - started)}


@contextmanager
def _measured_memory(caches: Caches) -> Iterator[Measured]:
    """Yield a dict that receives the peak memory, what is in use at the end beyond that before, and the KV bytes."""
    gc.collect()  # what earlier runs left in cycles must not be freed meanwhile
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    measured: Measured = {}
    yield measured
    mx.synchronize()
    measured |= {"active": mx.get_active_memory() - before, "peak": mx.get_peak_memory()}
    measured["kv"] = sum(cache.nbytes for cache in caches)
