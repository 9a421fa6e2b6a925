"""How much the format of keys changes what is evicted, against fp16 keys: Spearman of scores, Jaccard of the sets.

python benchmarks/evict/bench_formats.py [--length 2048] [--share 0.1] [--json FILE]

The embedded model reads WikiText-2 into a cache of each key format and nothing is evicted; then the body is scored and
the worst share of it selected. Queries are calibrated in the same run, so that what a format does to the model counts.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_tq.cache.evicting import EvictingKVCache
from mlx_tq.cache.factory import build_caches
from mlx_tq.codec.formats import format_names
from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.dispatch import attention, plan_caches
from mlx_tq.environment import environment
from mlx_tq.evict.policy import Body
from mlx_tq.evict.selection import Span, select
from mlx_tq.haystack import load_text
from mlx_tq.models import load

EVICT = EvictConfig(budget="100%")


def scores_of(model: Any, ids: list[int], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Scores and positions of the body after reading `ids` with keys of a format."""
    config = KVConfig(key=key, value="tq4", prefix=32, window=64, evict=EVICT)
    caches = build_caches(plan_caches(model, config))
    with attention(model):
        for start in range(0, len(ids), 512):
            mx.eval(model(mx.array([ids[start : start + 512]]), cache=caches))
    layers = [cache for cache in caches if isinstance(cache, EvictingKVCache)]
    first = layers[0]
    body = Body([layer.packed_layer() for layer in layers], first.body_positions, first.offset, 0)
    return first.coordinator.policy.score(body), first.body_positions


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Rank correlation."""
    ranks = [np.argsort(np.argsort(x)) for x in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def main() -> None:
    """Measure every format."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model, tokenizer = load()
    ids = list(tokenizer.encode(load_text(), add_special_tokens=False, verbose=False))[: args.length]
    reference, positions = scores_of(model, ids, "fp16")
    count = round(args.share * len(positions))
    span = Span(32, args.length - 64)
    wanted = set(select(reference, positions, count, span, EVICT).tolist())
    rows = []
    for key in format_names():
        scores, _ = scores_of(model, ids, key)
        found = set(select(scores, positions, count, span, EVICT).tolist())
        jaccard = len(found & wanted) / len(found | wanted)
        rows.append({"key": key, "spearman": spearman(scores, reference), "jaccard": jaccard})
        print(rows[-1], flush=True)
    if args.json:
        command = f"python benchmarks/evict/bench_formats.py --length {args.length} --share {args.share}"
        args.json.write_text(json.dumps({"command": command, **environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
