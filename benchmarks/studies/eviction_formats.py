"""Study how the format of keys changes what is evicted: Spearman of scores, Jaccard of sets, against fp16 keys.

    python -m benchmarks.studies.eviction_formats --models embedded,smollm2,gemma-3-270m.gguf

A model prefills WikiText-2 into fp16 keys without eviction. Then its keys are packed in each format, and scored.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks.reports import ALL_NAMES, named_model, survey_models
from benchmarks.studies.eviction_scores import calibrators, layers_of
from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.cli.inputs import load_text
from mlx_tq.codec.formats import format_names, get_format
from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.errors import ConfigError
from mlx_tq.policies import PackedLayer, PackedTokens, TriAttention
from mlx_tq.policies.selection import PositionRange, select
from mlx_tq.prompt_cache.build import build_caches
from mlx_tq.prompt_cache.compressed import compressed_attention, plan_caches
from mlx_tq.prompt_cache.layer_group import compressed_caches

PREFIX, WINDOW, STEP = 32, 64, 512
LENGTH, SHARES = 2048, (0.1, 0.25)
POLICY = TriAttention(calibration="text", granularity=1)
CONFIG = KVConfig(key="fp16", value="fp16", sinks=PREFIX, window=WINDOW, evict=EvictConfig(POLICY, "100%", "off"))


def read(model: Any, ids: list[int]) -> list[CompressedKVCache]:
    caches = build_caches(plan_caches(model, CONFIG))
    with compressed_attention(model):
        for start in range(0, len(ids), STEP):
            mx.eval(model(mx.array([ids[start : start + STEP]]), cache=caches))
    return compressed_caches(caches)


def stores(head_dim: int, key: str) -> bool:
    with suppress(ConfigError):
        get_format(key).bytes_per_vector(head_dim)
        return True
    return False


def packed_as(key: str, number: int, source: CompressedKVCache, layer: PackedLayer) -> PackedLayer:
    """Return the same keys in another format, less the mean of their block where the format takes that."""
    pairs = tuple(zip(*np.array(layer.rope.pairs).tolist(), strict=True)) if layer.rope else None
    twin = CompressedKVCache(CacheSpec.for_layer(CONFIG, number, key, "fp16", pairs=pairs))
    twin.append(*source.keys_and_values()[0].view.merged_regions().decode())
    twin.stop_learning()
    rows, layout, normalization = twin.packed_rows()
    return replace(layer, rows=rows[:, :, : twin.packed_tokens], layout=layout, normalization=normalization)


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    ranks = [np.argsort(np.argsort(x)) for x in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def overlaps(name: str) -> Iterator[dict[str, Any]]:
    model, tokenizer = named_model(name)
    ids = list(tokenizer.encode(load_text(), add_special_tokens=False, verbose=False))[:LENGTH]
    caches = read(model, ids)
    first, positions = caches[0], caches[0].packed_positions
    stats = [calibrator.stats for calibrator in calibrators(caches).values()]
    layers = layers_of(caches, stats)
    span = PositionRange(PREFIX, LENGTH - WINDOW)

    def scored(layers: list[PackedLayer]) -> np.ndarray:
        return POLICY.score(PackedTokens(layers, positions, first.offset, 0))

    def evicted(scores: np.ndarray, share: float) -> set[int]:
        return set(select(scores, positions, round(share * len(positions)), span, POLICY).tolist())

    reference = scored(layers)
    for key in filter(partial(stores, layers[0].layout.key.head_dim), format_names()):
        scores = scored([packed_as(key, n, *each) for n, each in enumerate(zip(caches, layers, strict=True))])
        row: dict[str, Any] = {"model": ALL_NAMES[name], "key": key, "spearman": spearman(scores, reference)}
        for share in SHARES:
            found, wanted = evicted(scores, share), evicted(reference, share)
            row[f"jaccard_{share:g}"] = len(found & wanted) / len(found | wanted)
        yield row


if __name__ == "__main__":
    survey_models(__doc__, "benchmarks.studies.eviction_formats", "evict_formats.json", overlaps)
