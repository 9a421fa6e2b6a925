"""Study the parts of a decode step: building its graph in Python, computing it, and packing a block.

    python -m benchmarks.studies.decode_step --models smollm2

Each step is evaluated before the next one is built, so that the parts can be separated; mlx-lm overlaps them. Caches
take turns. Packing is the difference of medians of steps with and without it, divided by the 32 tokens of a block.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import mlx.core as mx

from benchmarks.reports import ALL_NAMES, named_model, survey_models
from mlx_tq import compressed_attention, make_prompt_cache
from mlx_tq.cli.inputs import load_text
from mlx_tq.config import BLOCK, PROFILES
from mlx_tq.integration.probe import native_caches
from mlx_tq.prompt_cache.layer_group import compressed_caches

TOKENS, PROFILES_TIMED = (1024, 4096), ("off", "balanced", "small")
ROUNDS, STEPS, READ = 6, 32, 512  # a round of steps packs one block


def fill_caches(model: Any, ids: list[int]) -> dict[str, list[Any]]:
    caches = {}
    for name in PROFILES_TIMED:
        config = PROFILES[name]
        caches[name] = native_caches(model) if config.is_off else make_prompt_cache(model, config)
        for start in range(0, len(ids), READ):
            mx.eval(model(mx.array([ids[start : start + READ]]), cache=caches[name]))
    return caches


class Step(NamedTuple):
    build_seconds: float
    compute_seconds: float
    packs_block: bool


def run_steps(model: Any, cache: list[Any], count: int) -> Iterator[Step]:
    token, layers = mx.array([[5]]), compressed_caches(cache)
    for _ in range(count):
        before = layers[0].packed_tokens if layers else 0
        began = time.perf_counter()
        token = model(token, cache=cache)[:, -1:].argmax(-1)
        built = time.perf_counter()
        mx.eval(token)
        ended = time.perf_counter()
        yield Step(built - began, ended - built, bool(layers) and layers[0].packed_tokens > before)


def parts(name: str) -> Iterator[dict[str, Any]]:
    model, tokenizer = named_model(name)
    ids = list(tokenizer.encode(load_text(), add_special_tokens=False, verbose=False))
    for tokens in TOKENS:
        steps: dict[str, list[Step]] = defaultdict(list)
        with compressed_attention(model):
            caches = fill_caches(model, ids[:tokens])
            for cache in caches.values():
                list(run_steps(model, cache, 2))  # warms up
            for _ in range(ROUNDS):
                for kind, cache in caches.items():
                    steps[kind] += run_steps(model, cache, STEPS)
        for kind, timed in steps.items():
            plain, packing = ([step for step in timed if step.packs_block == packs] for packs in (False, True))
            build, compute = (1000 * statistics.median(part) for part in zip(*(s[:2] for s in plain), strict=True))
            whole = 1000 * statistics.median(sum(step[:2]) for step in plain)
            slow = 1000 * statistics.median(sum(step[:2]) for step in packing) if packing else whole
            yield {
                "model": ALL_NAMES[name],
                "tokens": tokens,
                "cache": kind,
                "asked_ms": build,
                "computed_ms": compute,
                "packing_ms": (slow - whole) / BLOCK,
                "step_ms": whole + (slow - whole) / BLOCK,
            }


if __name__ == "__main__":
    survey_models(__doc__, "benchmarks.studies.decode_step", "step_parts.json", parts, ("smollm2",))
