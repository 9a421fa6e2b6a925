"""What it adds to a step of decoding that the layers keep their queries for the next look.

Steps without, with, with and without it take turns, so what a growing cache and other processes add is in both. A turn
counts with its median steps, which the packing of a block's tokens does not make longer.

python -m benchmarks.recall.bench_listening --models embedded,smollm2
"""

import argparse
import json
import time
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks.recall.bench_look import LIVE, NAMES, RESULTS, decided, named_model
from mlx_tq import compressed, make_prompt_cache
from mlx_tq.commands.environment import environment
from mlx_tq.config import KVConfig
from mlx_tq.policies import EvictConfig
from mlx_tq.sequence.passes import sequence_in
from mlx_tq.sequence.recall import looking

STEPS = 64  # of a turn


def step(model: Any, caches: list[Any]) -> float:
    """Seconds of a step of one token."""
    began = time.perf_counter()
    mx.eval(model(mx.array([[5]]), cache=caches))
    return time.perf_counter() - began


def turns(model: Any, numbers: range, count: int) -> tuple[list[float], float]:
    """Of each of `count` turns the median step that keeps these layers' queries over that of others; that of others."""
    caches = make_prompt_cache(model, KVConfig(evict=EvictConfig("recency", (count + 1) * LIVE, "auto")))
    sequence = sequence_in(caches)
    assert sequence is not None
    sequence.listen(numbers, rounds=True)
    listening, found, others = sequence._listeners, [], []
    with compressed(model):
        mx.eval(model(mx.arange(LIVE)[None], cache=caches))
        for _ in range(count):
            taken: dict[bool, list[float]] = {True: [], False: []}
            for number in range(STEPS):
                listens = number % 4 in (1, 2)
                sequence._listeners = listening if listens else {}
                taken[listens].append(step(model, caches))
            with_it, without = (float(np.median(taken[listens])) for listens in (True, False))
            found.append(with_it / without)
            others.append(without)
    return found, float(np.median(others))


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="embedded,smollm2", help="of these two, joined by commas")
    parser.add_argument("--turns", type=int, default=40)
    args = parser.parse_args()
    rows = []
    for name in args.models.split(","):
        model, _ = named_model(name)
        numbers = looking(len(model.layers))[: decided(NAMES[name])]
        ratios, without = turns(model, numbers, args.turns)
        added = 100 * (np.array(ratios) - 1)
        error = float(added.std(ddof=1) / np.sqrt(len(added)))
        row = {"model": NAMES[name], "listening": len(numbers), "turns": len(added), "step_ms": 1000 * without}
        rows.append(row | {"added": float(added.mean()), "error": error})
        print(rows[-1], flush=True)
    command = f"python -m benchmarks.recall.bench_listening --models {args.models}"
    report = {"command": command, "environment": environment(), "rows": rows}
    (RESULTS / "recall_listening.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
