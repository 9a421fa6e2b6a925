"""Measure attention in a decode step of one stream, of eight with copies of one prefix, and of eight that share it.

    taskset -c 0 python -m benchmarks.store.bench_shared_steps

The caches have the shape of SmolLM2-135M, and random keys and values. Each stream continues with
16 to 128 tokens of its own. The three take turns; a ratio is the median over rounds of the ratio of two in one round.
Next to the wall time is the processor time, which other programs on the machine change less; on one core no thread
waits for another.
"""

import argparse
import json
import time
from statistics import median
from typing import Any

import mlx.core as mx

from benchmarks.reports import save
from mlx_tq.cache.batch import BatchCompressedKVCache
from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.config import DEFAULT_PROFILE, PROFILES
from mlx_tq.kernels import backend
from mlx_tq.models import load
from mlx_tq.prompt_cache.compressed import compressed_attention

LAYERS, HEADS, QUERY_HEADS, DIM = 30, 3, 9, 64
PREFIX, OWN, STREAMS = 4096, 128, 8
PAIRS = tuple((i, i + DIM // 2) for i in range(DIM // 2))  # dims that RoPE rotates together
SCALE, CHUNK = DIM**-0.5, 512


def random(rows: int, heads: int, tokens: int) -> mx.array:
    return mx.random.normal((rows, heads, tokens, DIM)).astype(mx.float16)


def make_prefix(profile: str, layer: int) -> CompressedKVCache:
    config = PROFILES[profile]
    cache = CompressedKVCache(CacheSpec.for_layer(config, layer, config.key, config.value, pairs=PAIRS))
    for _ in range(0, PREFIX, CHUNK):
        view = cache.append(*(random(1, HEADS, CHUNK) for _ in "kv"))
        mx.eval(view.attend(random(1, QUERY_HEADS, CHUNK), SCALE, "causal", None))
    return cache


def make_batch(prefix: CompressedKVCache, streams: int, *, shared: bool) -> tuple[BatchCompressedKVCache, Any]:
    """Return a batch of streams that continue the prefix, and the view of its last step."""
    rows = [prefix.fork() for _ in range(streams)]
    for number, row in enumerate(rows):
        if not shared:
            row.replace_packed(row.packed_rows()[0] + 0, row.packed_positions)
        own = OWN * (number + 1) // streams
        row.append(*(random(1, HEADS, own - 1) for _ in "kv"))
    batch = BatchCompressedKVCache(rows)
    key, _ = batch.update_and_fetch(*(random(streams, HEADS, 1) for _ in "kv"))
    mx.eval(batch.state)
    return batch, key.view


def measure(profile: str, rounds: int) -> dict[str, Any]:
    prefixes = [make_prefix(profile, layer) for layer in range(LAYERS)]
    arms = {
        "one": [make_batch(prefix, 1, shared=True) for prefix in prefixes],
        "copies": [make_batch(prefix, STREAMS, shared=False) for prefix in prefixes],
        "shared": [make_batch(prefix, STREAMS, shared=True) for prefix in prefixes],
    }
    queries = {name: random(len(layers[0][0].rows), QUERY_HEADS, 1) for name, layers in arms.items()}
    mx.eval(queries)
    clocks = {"wall": time.perf_counter, "processor": time.process_time}
    seconds: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in arms} for clock in clocks}
    for _ in range(rounds + 1):
        for name, layers in arms.items():
            started = [read() for read in clocks.values()]
            mx.eval([view.attend(queries[name], SCALE, None, None) for _, view in layers])
            for clock, start in zip(clocks, started, strict=True):
                seconds[clock][name].append(clocks[clock]() - start)
    cache_bytes = {name: sum(batch.nbytes for batch, _ in layers) for name, layers in arms.items()}
    times = {clock: summarize(values) for clock, values in seconds.items()}
    return {"profile": profile, **times, "cache_bytes": cache_bytes}


def summarize(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians without the first round."""

    def ratio(one: str, other: str) -> float:
        return round(median(a / b for a, b in zip(seconds[one][1:], seconds[other][1:], strict=True)), 3)

    return {
        "milliseconds": {name: round(1000 * median(values[1:]), 2) for name, values in seconds.items()},
        "shared_to_copies": ratio("shared", "copies"),
        "shared_to_one": ratio("shared", "one"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    model, _ = load()
    figures = []
    with compressed_attention(model):
        for profile in (DEFAULT_PROFILE, "small"):
            figures.append(measure(profile, args.rounds))
            print(json.dumps(figures[-1]), flush=True)
    shape = {"layers": LAYERS, "kv_heads": HEADS, "query_heads": QUERY_HEADS, "head_dim": DIM}
    setting = {"prefix": PREFIX, "own": OWN, "streams": STREAMS, "rounds": args.rounds, "backend": backend.current()}
    command = f"taskset -c 0 python -m benchmarks.store.bench_shared_steps --rounds {args.rounds}"
    save("store_shared_steps.json", command, **shape, **setting, figures=figures)


if __name__ == "__main__":
    main()
