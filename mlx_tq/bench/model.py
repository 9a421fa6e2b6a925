"""Measure the speed and memory of a whole model on each kind of cache, in one run.

The caches take turns, several rounds, so that what slows the machine down slows all of them down. Prefill and decoding
go through mlx-lm's own `generate_step`; a batch is made of copies of the prefilled cache, merged as a server merges.
mlx-lm's caches run on mlx-lm as it is, without the patches that compressed caches need.
"""

import copy
import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import QuantizedKVCache

from mlx_tq.cache.layer import cache_parts
from mlx_tq.config import KVConfig
from mlx_tq.integration.probe import native_caches
from mlx_tq.kernels import backend
from mlx_tq.prompt_cache.compressed import compressed_attention, make_prompt_cache
from mlx_tq.prompt_cache.memory import weights_nbytes

Caches = list[Any]
Measured = dict[str, float]  # of one round

GROUP_SIZE = 64  # mlx_lm.generate's default
NOT_PREFILLED = (
    "mlx-lm prefills a quantized cache slowly on a CPU, so it decodes from mlx-lm's own prefilled cache, quantized; "
    "its peak is that of decoding"
)


@dataclass(frozen=True)
class BenchedCache:
    """One kind of cache: a compressed one, mlx-lm's own, or mlx-lm's quantized one (`kv_bits`)."""

    name: str
    config: KVConfig | None = None
    kv_bits: int | None = None

    def make(self, model: Any) -> Caches:
        return native_caches(model) if self.config is None else make_prompt_cache(model, self.config)

    def attention(self, model: Any) -> AbstractContextManager[object]:
        """Return the context to run in: mlx-lm's caches need none."""
        return nullcontext() if self.config is None else compressed_attention(model)

    def quantize(self, caches: Caches) -> Caches:
        return [cache.to_quantized(group_size=GROUP_SIZE, bits=self.kv_bits) for cache in caches]

    @property
    def is_prefilled(self) -> bool:
        """Whether it reads the prompt itself. A quantized cache does on a GPU only: see `NOT_PREFILLED`."""
        return self.kv_bits is None or backend.is_gpu()


@dataclass(frozen=True)
class Figure:
    """Medians of the rounds for one cache at one type, context and batch size."""

    arm: str  # name of the cache
    dtype: str
    tokens: int  # of the prompt
    batch: int
    prefill_tps: float | None  # tokens per second; None for a batch, whose rows are copies, and without a prefill
    prefill_low: float | None  # extremes of the rounds that prefill
    prefill_high: float | None
    first_token: float | None  # seconds
    decode_tps: float  # tokens per second of all rows; low and high are the extremes of the rounds
    low: float
    high: float
    kv_nbytes: int  # of the caches' arrays after decoding
    active_nbytes: int  # in use after decoding because of these caches
    peak_nbytes: int  # of the model's weights, and at most in use beyond what was in use without these caches


def measure_model(
    model: Any,
    prompt: list[int],
    caches: list[BenchedCache],
    *,
    dtype: str,
    batches: list[int],
    max_tokens: int,
    rounds: int,
    prefill_rounds: int,
    step: int,
    skipped: dict[str, str],
    advance: Callable[[int], None] = lambda done: None,
) -> list[Figure]:
    """Run every cache on one prompt; rounds after the first `prefill_rounds` decode from copies of prefilled caches.

    mlx has no kernel for mlx-lm's quantized cache of some shapes on some backends: `skipped` receives those caches with
    mlx's message. Caches that mlx-lm cannot batch have figures of one row only.
    """
    measured: dict[tuple[str, int], list[Measured]] = defaultdict(list)
    run = _Run(model, prompt, caches, batches, max_tokens, step, rounds, prefill_rounds)
    for number in range(rounds):
        for cache in caches:
            try:
                if cache.name not in skipped:
                    with cache.attention(model):
                        for batch, values in run.measure(cache, number).items():
                            measured[cache.name, batch].append(values)
            except RuntimeError as error:
                if cache.kv_bits is None:
                    raise
                skipped[cache.name] = str(error)
            advance(1)
    skipped |= {f"{cache.name}: prefill": NOT_PREFILLED for cache in caches if not cache.is_prefilled}
    weights = weights_nbytes(model)
    return [
        _figure(name, dtype, len(prompt), batch, weights, values)
        for (name, batch), values in measured.items()
        if name not in skipped
    ]


def _figure(arm: str, dtype: str, tokens: int, batch: int, weights: int, rounds: list[Measured]) -> Figure:
    firsts = [values["first_token"] for values in rounds if "first_token" in values]
    first = statistics.median(firsts) if firsts else None
    rates = [values["rate"] for values in rounds]
    kv, active, peak = (int(max(values[key] for values in rounds)) for key in ("kv", "active", "peak"))
    return Figure(
        arm=arm,
        dtype=dtype,
        tokens=tokens,
        batch=batch,
        prefill_tps=None if first is None else tokens / first,
        prefill_low=tokens / max(firsts) if firsts else None,
        prefill_high=tokens / min(firsts) if firsts else None,
        first_token=first,
        decode_tps=statistics.median(rates),
        low=min(rates),
        high=max(rates),
        kv_nbytes=kv,
        active_nbytes=active,
        peak_nbytes=weights + peak,
    )


@dataclass
class _Run:
    """The rounds of one prompt, and the prefilled caches that later turns need."""

    model: Any
    prompt: list[int]
    benched: list[BenchedCache]
    batches: list[int]
    max_tokens: int
    step: int
    rounds: int
    prefill_rounds: int
    prefilled: dict[str, Caches] = field(default_factory=dict)

    def measure(self, cache: BenchedCache, number: int) -> dict[int, Measured]:
        """Prefill, unless an earlier round did, then decode alone and in each batch; the result is by batch size."""
        prefill = self._prefill(cache) if number < self.prefill_rounds else {}
        caches = self.prefilled.pop(cache.name)
        if self._is_used_again(cache, number):
            self.prefilled[cache.name] = caches
            caches = copy.deepcopy(caches)  # the two share arrays until one of them writes
        measured = {1: prefill | self._decode(caches)}
        if not any(isinstance(part, QuantizedKVCache) for part in cache_parts(caches)):  # mlx-lm cannot merge these
            measured |= {batch: self._decode_batch(caches, batch) for batch in self.batches if batch > 1}
        del caches
        without = _settle()
        measured[1]["active"] -= without
        measured[1]["peak"] = max(measured[1]["peak"] - without, prefill.get("peak", 0))
        return measured

    def _is_used_again(self, cache: BenchedCache, number: int) -> bool:
        is_source = cache.config is None and not all(other.is_prefilled for other in self.benched)
        return is_source or self.prefill_rounds <= number + 1 < self.rounds

    def _prefill(self, cache: BenchedCache) -> Measured:
        """Prefill caches of this kind, or quantize those of mlx-lm, which had their turn before."""
        self.prefilled.pop(cache.name, None)
        if not cache.is_prefilled:
            source = next(other.name for other in self.benched if other.config is None and other.is_prefilled)
            self.prefilled[cache.name] = cache.quantize(self.prefilled[source])
            mx.eval([part.state for part in self.prefilled[cache.name]])
            return {}
        before = _settle()
        caches = self.prefilled[cache.name] = cache.make(self.model)
        options = {} if cache.kv_bits is None else {"kv_bits": cache.kv_bits, "quantized_kv_start": 0}
        seconds = prefill(self.model, self.prompt, caches, self.step, **options)
        return {"first_token": seconds, "peak": mx.get_peak_memory() - before}

    def _decode(self, caches: Caches) -> Measured:
        """Decode alone; memory includes what was in use before."""
        _settle()
        return {"rate": decode(self.model, caches, self.prompt[-1], self.max_tokens)} | _memory(caches)

    def _decode_batch(self, caches: Caches, batch: int) -> Measured:
        """Decode copies of a sequence together; like mlx-lm, start each step before the previous one has ended."""
        before = _settle()
        merged = [cache.merge([cache] * batch) for cache in caches]
        tokens = mx.full((batch, 1), self.prompt[-1])
        tokens = self.model(tokens, cache=merged)[:, -1:].argmax(-1)
        mx.eval(tokens)  # the time to merge does not count
        started = time.perf_counter()
        for _ in range(self.max_tokens):
            following = self.model(tokens, cache=merged)[:, -1:].argmax(-1)
            mx.async_eval(following)  # type: ignore[no-untyped-call]
            mx.eval(tokens)
            tokens = following
        mx.eval(tokens)
        measured = {"rate": batch * self.max_tokens / (time.perf_counter() - started)} | _memory(merged)
        return measured | {name: measured[name] - before for name in ("active", "peak")}


def prefill(model: Any, prompt: list[int], caches: Caches, step: int, **options: Any) -> float:
    """Prefill caches and return the seconds to the first token."""
    started = time.perf_counter()
    # Without tokens to generate it computes the first one, and does not begin the next.
    list(generate_step(mx.array(prompt), model, max_tokens=0, prompt_cache=caches, prefill_step_size=step, **options))
    return time.perf_counter() - started


def decode(model: Any, caches: Caches, token: int, max_tokens: int) -> float:
    """Decode from any token, as all take the same time, and return tokens per second."""
    tokens = generate_step(mx.array([token]), model, max_tokens=max_tokens, prompt_cache=caches)
    next(tokens)
    started = time.perf_counter()
    for _ in tokens:
        pass
    return (max_tokens - 1) / (time.perf_counter() - started)


def _settle() -> int:
    """Free what is not in use, and return the bytes that are."""
    gc.collect()  # what earlier runs left in cycles must not be freed meanwhile
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    return mx.get_active_memory()


def _memory(caches: Caches) -> Measured:
    mx.synchronize()
    nbytes = sum(cache.nbytes for cache in caches)
    return {"kv": nbytes, "active": mx.get_active_memory(), "peak": mx.get_peak_memory()}
