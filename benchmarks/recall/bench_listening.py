"""What it adds to a step of decoding that the layers keep their queries for the next look.

Steps without, with, with and without it take turns, so what a growing cache and other processes add is in both. A turn
counts with its median steps, which the packing of a block's tokens does not make longer.

python -m benchmarks.recall.bench_listening --models embedded,smollm2
"""

import time
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks.named_models import NAMES, named_model, survey_models
from benchmarks.recall.bench_look import LIVE, decided
from mlx_tq import compressed, make_prompt_cache
from mlx_tq.config import KVConfig
from mlx_tq.policies import EvictConfig
from mlx_tq.prompt_cache.passes import sequence_in
from mlx_tq.prompt_cache.recall import looking

TURNS, STEPS = 40, 64  # steps of a turn


def step(model: Any, caches: list[Any]) -> float:
    """Seconds of a step of one token."""
    began = time.perf_counter()
    mx.eval(model(mx.array([[5]]), cache=caches))
    return time.perf_counter() - began


def turns(model: Any, numbers: range) -> tuple[list[float], float]:
    """Of each turn the median step that keeps these layers' queries over that of others; that of others."""
    caches = make_prompt_cache(model, KVConfig(evict=EvictConfig("recency", (TURNS + 1) * LIVE, "auto")))
    sequence = sequence_in(caches)
    assert sequence is not None
    sequence.listen(numbers, rounds=True)
    listening, found, others = sequence._listeners, [], []
    with compressed(model):
        mx.eval(model(mx.arange(LIVE)[None], cache=caches))
        for _ in range(TURNS):
            taken: dict[bool, list[float]] = {True: [], False: []}
            for number in range(STEPS):
                listens = number % 4 in (1, 2)
                sequence._listeners = listening if listens else {}
                taken[listens].append(step(model, caches))
            with_it, without = (float(np.median(taken[listens])) for listens in (True, False))
            found.append(with_it / without)
            others.append(without)
    return found, float(np.median(others))


def added(name: str) -> Iterator[dict[str, Any]]:
    """What a step that keeps queries takes longer, in percent, with its error."""
    model, _ = named_model(name)
    numbers = looking(len(model.layers))[: decided(NAMES[name])]
    ratios, without = turns(model, numbers)
    more = 100 * (np.array(ratios) - 1)
    error = float(more.std(ddof=1) / np.sqrt(len(more)))
    row = {"model": NAMES[name], "listening": len(numbers), "turns": len(more), "step_ms": 1000 * without}
    yield row | {"added": float(more.mean()), "error": error}


if __name__ == "__main__":
    survey_models(__doc__.partition("\n")[0], "benchmarks.recall.bench_listening", "recall_listening.json", added)
