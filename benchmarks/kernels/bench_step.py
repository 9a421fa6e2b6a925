"""Where a step of an answer spends its time: asking for it in Python, computing it, and packing a block now and then.

python -m benchmarks.kernels.bench_step --models smollm2

Every step is waited for, so that its parts can be told apart; in use, the next one is asked for meanwhile. Caches take
turns, several rounds; what a step takes is the median of those that pack nothing, and what packing adds to it is what
the median of those that pack a block takes more, shared by the 32 of its tokens.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import mlx.core as mx

from benchmarks.named_models import ALL_NAMES, named_model, survey_models
from mlx_tq import compressed, make_prompt_cache
from mlx_tq.cli.haystack import load_text
from mlx_tq.config import BLOCK, PROFILES
from mlx_tq.integration.probe import native_caches
from mlx_tq.prompt_cache.passes import compressed_caches

TOKENS, PROFILES_TIMED = (1024, 4096), ("off", "balanced", "small")
ROUNDS, STEPS, READ = 6, 32, 512  # a round of steps packs one block


def filled(model: Any, ids: list[int]) -> dict[str, list[Any]]:
    """Each kind of cache after reading."""
    caches = {}
    for name in PROFILES_TIMED:
        config = PROFILES[name]
        caches[name] = native_caches(model) if config.is_off else make_prompt_cache(model, config)
        for start in range(0, len(ids), READ):
            mx.eval(model(mx.array([ids[start : start + READ]]), cache=caches[name]))
    return caches


class Step(NamedTuple):
    """Seconds in which a step was asked for and computed, and whether it packed a block."""

    asked: float
    computed: float
    packed: bool


def steps(model: Any, cache: list[Any], count: int) -> Iterator[Step]:
    """So many steps of an answer."""
    token, layers = mx.array([[5]]), compressed_caches(cache)
    for _ in range(count):
        before = layers[0].body_tokens if layers else 0
        began = time.perf_counter()
        token = model(token, cache=cache)[:, -1:].argmax(-1)
        asked = time.perf_counter()
        mx.eval(token)
        ended = time.perf_counter()
        yield Step(asked - began, ended - asked, bool(layers) and layers[0].body_tokens > before)


def parts(name: str) -> Iterator[dict[str, Any]]:
    """Of a model, by context and kind of cache."""
    model, tokenizer = named_model(name)
    ids = list(tokenizer.encode(load_text(), add_special_tokens=False, verbose=False))
    for tokens in TOKENS:
        found: dict[str, list[Step]] = defaultdict(list)
        with compressed(model):
            caches = filled(model, ids[:tokens])
            for cache in caches.values():
                list(steps(model, cache, 2))  # what is compiled is compiled
            for _ in range(ROUNDS):
                for kind, cache in caches.items():
                    found[kind] += steps(model, cache, STEPS)
        for kind, every in found.items():
            plain, packing = ([step for step in every if step.packed == packed] for packed in (False, True))
            asked, computed = (1000 * statistics.median(part) for part in zip(*(s[:2] for s in plain), strict=True))
            whole = 1000 * statistics.median(step.asked + step.computed for step in plain)
            slow = 1000 * statistics.median(s.asked + s.computed for s in packing) if packing else whole
            yield {
                "model": ALL_NAMES[name],
                "tokens": tokens,
                "cache": kind,
                "asked_ms": asked,
                "computed_ms": computed,
                "packing_ms": (slow - whole) / BLOCK,
                "step_ms": whole + (slow - whole) / BLOCK,
            }


if __name__ == "__main__":
    about = __doc__.partition("\n")[0]
    survey_models(about, "benchmarks.kernels.bench_step", "step_parts.json", parts, ("smollm2",))
