"""A whole model: how fast it reads and answers on each kind of cache, and the memory that takes, in one run.

Every arm is run in turn, several rounds, so that what slows the machine down slows all of them down. Reading and the
answer go through mlx-lm's own `generate_step`; a batch is copies of the cache that was read, merged as a server merges.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import QuantizedKVCache

from mlx_tq.config import KVConfig
from mlx_tq.integration.probe import native_caches
from mlx_tq.prompt_cache.compressed import compressed, make_prompt_cache
from mlx_tq.prompt_cache.passes import cache_parts

Caches = list[Any]


@dataclass(frozen=True)
class Arm:
    """One way to store the cache.

    Attributes:
        name: in the results.
        config: of a compressed cache, or None for one of mlx-lm.
        kv_bits: of mlx-lm's quantised cache, or None.
    """

    name: str
    config: KVConfig | None = None
    kv_bits: int | None = None

    def caches(self, model: Any) -> Caches:
        """Empty caches.

        Raises:
            UnsupportedModelError, ConfigError: as `make_prompt_cache`.
        """
        return native_caches(model) if self.config is None else make_prompt_cache(model, self.config)

    @property
    def options(self) -> dict[str, int]:
        """What `generate_step` is told."""
        return {} if self.kv_bits is None else {"kv_bits": self.kv_bits, "quantized_kv_start": 0}


@dataclass(frozen=True)
class Figure:
    """One arm at one type, context and batch; medians of the rounds, and of the answer also the extremes.

    Attributes:
        arm: its name.
        dtype: of the model.
        tokens: of the prompt.
        batch: rows that answer at once.
        prefill_tps: tokens a second while the prompt is read; None for a batch, whose rows are copies.
        first_token: seconds until the first token; None likewise.
        decode_tps: tokens a second of the answer, all rows together; low and high are the extremes.
        kv_nbytes: of the caches' arrays.
        active_nbytes: held after the answer beyond what was held before the prompt.
        peak_nbytes: held at most, weights included.
    """

    arm: str
    dtype: str
    tokens: int
    batch: int
    prefill_tps: float | None
    first_token: float | None
    decode_tps: float
    low: float
    high: float
    kv_nbytes: int
    active_nbytes: int
    peak_nbytes: int


@dataclass
class _Rounds:
    """What the rounds of one arm and batch gave; bytes are the same in each, so the largest stands."""

    first: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    kv: int = 0
    active: int = 0
    peak: int = 0

    def figure(self, arm: str, dtype: str, tokens: int, batch: int) -> Figure:
        first = statistics.median(self.first) if self.first else None
        rate, low, high = statistics.median(self.rates), min(self.rates), max(self.rates)
        prefill = None if first is None else tokens / first
        return Figure(arm, dtype, tokens, batch, prefill, first, rate, low, high, self.kv, self.active, self.peak)


def measure_model(
    model: Any,
    prompt: list[int],
    arms: list[Arm],
    *,
    dtype: str,
    batches: list[int],
    answer: int,
    rounds: int,
    step: int,
    left_out: dict[str, str],
    advance: Callable[[], None] = lambda: None,
) -> list[Figure]:
    """Run every arm on one prompt.

    Args:
        model: of mlx-lm.
        prompt: its tokens.
        arms: to compare.
        dtype: the model's, for the figures.
        batches: rows that answer at once; an arm whose caches mlx-lm cannot batch has figures of one row alone.
        answer: tokens of it, at least 2.
        rounds: of all arms.
        step: tokens read at a time.
        left_out: gets the arms of mlx-lm's quantised cache that mlx has no kernel for here, with what it says.
        advance: called after each arm of a round.

    Raises:
        UnsupportedModelError, ConfigError: as `make_prompt_cache`.
    """
    found: dict[tuple[str, int], _Rounds] = defaultdict(_Rounds)
    for _ in range(rounds):
        for arm in arms:
            try:
                if arm.name not in left_out:
                    with compressed(model):
                        _run(model, prompt, arm, batches, answer, step, found)
            except RuntimeError as error:
                if arm.kv_bits is None:
                    raise
                left_out[arm.name] = str(error)
            advance()
    kept = {key: rounds for key, rounds in found.items() if key[0] not in left_out}
    return [rounds.figure(arm, dtype, len(prompt), batch) for (arm, batch), rounds in kept.items()]


def _run(
    model: Any,
    prompt: list[int],
    arm: Arm,
    batches: list[int],
    answer: int,
    step: int,
    found: dict[tuple[str, int], _Rounds],
) -> None:
    """One arm once: read, answer alone, answer as each batch."""
    caches = arm.caches(model)
    kept = found[arm.name, 1]
    with _memory(kept):
        started = time.perf_counter()
        tokens = generate_step(
            mx.array(prompt),
            model,
            max_tokens=answer,
            prompt_cache=caches,
            prefill_step_size=step,
            **arm.options,
        )
        token, _ = next(tokens)
        first = time.perf_counter()
        for token, _ in tokens:  # noqa: B007  the last one goes on as a batch
            pass
        ended = time.perf_counter()
        mx.synchronize()
    kept.first.append(first - started)
    kept.rates.append((answer - 1) / (ended - first))
    kept.kv = max(kept.kv, _nbytes(caches))
    if any(isinstance(part, QuantizedKVCache) for part in cache_parts(caches)):
        return  # mlx-lm cannot merge these
    for batch in batches:
        if batch > 1:
            _answer_together(model, caches, int(token), batch, answer, found[arm.name, batch])


def _answer_together(model: Any, caches: Caches, token: int, batch: int, answer: int, kept: _Rounds) -> None:
    """Let copies of a sequence answer at once, each step asked for before the last is done, as mlx-lm does."""
    with _memory(kept):
        merged = [cache.merge([cache] * batch) for cache in caches]
        tokens = model(mx.full((batch, 1), token), cache=merged)[:, -1:].argmax(-1)
        mx.eval(tokens)  # merging is not what is timed
        started = time.perf_counter()
        for _ in range(answer):
            following = model(tokens, cache=merged)[:, -1:].argmax(-1)
            mx.async_eval(following)  # type: ignore[no-untyped-call]
            mx.eval(tokens)
            tokens = following
        mx.eval(tokens)
        ended = time.perf_counter()
        mx.synchronize()
    kept.rates.append(batch * answer / (ended - started))
    kept.kv = max(kept.kv, _nbytes(merged))


@contextmanager
def _memory(kept: _Rounds) -> Iterator[None]:
    """Note what the block holds at most, and at its end beyond what was held before."""
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    yield
    kept.active = max(kept.active, mx.get_active_memory() - before)
    kept.peak = max(kept.peak, mx.get_peak_memory())


def _nbytes(caches: Caches) -> int:
    return sum(cache.nbytes for cache in caches)
