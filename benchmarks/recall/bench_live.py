"""What the sum of all live weights costs a look while answering, which is computed anew, beside 64 steps.

python -m benchmarks.recall.bench_live [--models embedded,smollm2] [--live 512,4096,7500]

Attention could give the sums out with each step where it reads packed rows itself; a question is read by mlx's own
attention, which has none to give.
"""

import argparse
import json
import time
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks.named_models import NAMES, RESULTS, named_model
from benchmarks.recall.bench_look import ROUNDS, STEPS, decided, filled
from mlx_tq import compressed
from mlx_tq.commands.environment import environment
from mlx_tq.config import KVConfig
from mlx_tq.sequence.compressed import plan_caches
from mlx_tq.sequence.passes import sequence_in, sequence_layers
from mlx_tq.sequence.recall import Listener, looking


def sums(caches: list[Any], heads: int, numbers: range) -> float:
    """Seconds in which the layers with these numbers add up the live weights of 64 queries."""
    asking = []
    for layer in (sequence_layers(caches)[number] for number in numbers):
        listener, dim = Listener(), layer.keys_and_values()[0].shape[-1]
        queries = mx.random.normal((1, heads, STEPS, dim))
        mx.eval(queries)
        listener.hear(queries, 0.125)
        asking.append((listener, layer))
    began = time.perf_counter()
    for listener, layer in asking:
        listener.asked(layer, STEPS)
    return time.perf_counter() - began


def steps(model: Any, caches: list[Any]) -> float:
    """Seconds of 64 steps of one token."""
    with compressed(model):
        began = time.perf_counter()
        for _ in range(STEPS):
            mx.eval(model(mx.array([[5]]), cache=caches))
        return time.perf_counter() - began


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="embedded,smollm2", help="of these two, joined by commas")
    parser.add_argument("--live", default="512,4096,7500", help="tokens that the steps attend to")
    args = parser.parse_args()
    rows = []
    for name, live in product(args.models.split(","), map(int, args.live.split(","))):
        model, _ = named_model(name)
        plan, heads = plan_caches(model, KVConfig()), model.args.num_attention_heads
        numbers = looking(len(plan.layers))[: decided(NAMES[name])]
        caches, taken = filled(model, plan, 0, live), []
        sequence = sequence_in(caches)
        assert sequence is not None
        for _ in range(ROUNDS):
            taken.append((sums(caches, heads, numbers), steps(model, caches)))
        summing, stepping = (1000 * float(np.median(each)) for each in zip(*taken, strict=True))
        row = {"model": NAMES[name], "live": live, "layers": len(plan.layers), "looking": len(numbers)}
        row |= {"sums_ms": summing, "steps_ms": stepping, "share": summing / stepping}
        print(row)
        rows.append(row)
    about = {"command": f"python -m benchmarks.recall.bench_live --models {args.models} --live {args.live}"}
    (RESULTS / "recall_live.json").write_text(
        json.dumps({**about, "environment": environment(), "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
