"""How much the format of keys changes what is evicted, against fp16 keys: Spearman of scores, Jaccard of the sets.

python benchmarks/evict/bench_formats.py [--length 2048] [--shares 0.1,0.25] [--json FILE]

The embedded model reads WikiText-2 into a cache of fp16 keys, which calibrates itself and evicts nothing. Then its keys
are packed in each format, and the same tokens scored and the worst share of them selected.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from report import write
from scores import calibrators, layers_of

from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.codec.formats import format_names
from mlx_tq.commands.needles.haystack import load_text
from mlx_tq.config import KVConfig
from mlx_tq.models import load
from mlx_tq.policies import Body, EvictConfig, PackedLayer, TriAttention
from mlx_tq.policies.selection import PositionRange, select
from mlx_tq.sequence.build import build_caches
from mlx_tq.sequence.compressed import compressed, plan_caches
from mlx_tq.sequence.passes import compressed_caches

PREFIX, WINDOW, STEP = 32, 64, 512
POLICY = TriAttention(stats="text", granularity=1)
CONFIG = KVConfig(key="fp16", value="fp16", prefix=PREFIX, window=WINDOW, evict=EvictConfig(POLICY, "100%", "off"))


def read(model: Any, ids: list[int]) -> list[CompressedKVCache]:
    """The caches after reading `ids`."""
    caches = build_caches(plan_caches(model, CONFIG))
    with compressed(model):
        for start in range(0, len(ids), STEP):
            mx.eval(model(mx.array([ids[start : start + STEP]]), cache=caches))
    return compressed_caches(caches)


def packed_as(key: str, number: int, layer: PackedLayer, tokens: int) -> PackedLayer:
    """The same keys in another format."""
    rows = layer.rows[:, :, :tokens]
    keys, values = (codec.decode(part(rows)) for codec, part in (
        (layer.layout.key, layer.layout.keys), (layer.layout.value, layer.layout.values)
    ))  # fmt: skip
    pairs = tuple(zip(*np.array(layer.rope.pairs).tolist(), strict=True)) if layer.rope else None
    spec = CacheSpec.for_layer(CONFIG, number, key, "fp16", pairs=pairs)
    layout = spec.layout(keys.shape[-1], values.shape[-1], mx.bfloat16).fit(keys[:, :, :PREFIX], values[:, :, :PREFIX])
    pair = (x.astype(mx.bfloat16) for x in (keys, values))
    return replace(layer, rows=layout.encode(*pair).rows, layout=layout)


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Rank correlation."""
    ranks = [np.argsort(np.argsort(x)) for x in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def main() -> None:
    """Measure every format."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--shares", default="0.1,0.25")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model, tokenizer = load()
    ids = list(tokenizer.encode(load_text(), add_special_tokens=False, verbose=False))[: args.length]
    caches = read(model, ids)
    first, positions = caches[0], caches[0].body_positions
    stats = [calibrator.stats for calibrator in calibrators(caches).values()]
    layers = layers_of(caches, stats)
    span = PositionRange(PREFIX, args.length - WINDOW)

    def scored(layers: list[PackedLayer]) -> np.ndarray:
        return POLICY.score(Body(layers, positions, first.offset, 0))

    def evicted(scores: np.ndarray, share: float) -> set[int]:
        return set(select(scores, positions, round(share * len(positions)), span, POLICY).tolist())

    reference, rows = scored(layers), []
    for key in format_names():
        scores = scored([packed_as(key, n, layer, len(positions)) for n, layer in enumerate(layers)])
        row: dict[str, Any] = {"key": key, "spearman": spearman(scores, reference)}
        for share in map(float, args.shares.split(",")):
            found, wanted = evicted(scores, share), evicted(reference, share)
            row[f"jaccard_{share:g}"] = len(found & wanted) / len(found | wanted)
        rows.append(row)
        print(row, flush=True)
    write(args.json, f"python benchmarks/evict/bench_formats.py --length {args.length} --shares {args.shares}", rows)


if __name__ == "__main__":
    main()
