"""Count what agreement costs ranks: calls and bytes per token, eviction round and search of the archive.

    mlx.launch -n 2 --backend ring -- python -m benchmarks.studies.rank_agreement

Layers of the embedded model's shape hold random keys and values. The counts of all ranks are the same.
"""

import json
import sys
from dataclasses import replace
from typing import Any

import mlx.core as mx

from benchmarks.reports import save
from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.distributed.group import Ranks, join
from mlx_tq.models import load
from mlx_tq.prompt_cache.build import build_caches
from mlx_tq.prompt_cache.compressed import plan_caches
from mlx_tq.prompt_cache.layer_group import LayerGroup, begin_pass, evicting_layers, layer_group_of

LIVE = (1024, 8192)
STEP, QUERIES = 128, 64


class Counted:
    """Counts calls and bytes from its creation on."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._before = ranks, (ranks.calls, ranks.nbytes)

    def row(self, **about: Any) -> dict[str, Any]:
        calls, nbytes = self._before
        return {**about, "calls": self._ranks.calls - calls, "bytes": self._ranks.nbytes - nbytes}


def append(layers: list[CompressedKVCache], tokens: int, seed: int) -> None:
    for layer in layers:
        pair = [mx.random.normal((1, 1, tokens, 128), key=mx.random.key(seed + each)) for each in (0, 1)]
        view = layer.append(*pair)
        if seed == 0:
            view.attend(pair[0], 0.1, "causal", None)
        mx.eval(layer.state)


def filled(model: Any, live: int, recall: str) -> tuple[list[CompressedKVCache], LayerGroup]:
    """Return layers with so many live tokens, and a round that is due."""
    evict = EvictConfig("knorm:granularity=32:trigger=127", live, recall)
    caches = build_caches(plan_caches(model, KVConfig(normalize=False, evict=evict)))
    sequence = layer_group_of(caches)
    assert sequence is not None
    sequence.plan = replace(sequence.plan, positions=None)  # no model reads these
    layers = evicting_layers(caches)
    for start in range(0, live + STEP, 8 * STEP):
        count = min(8 * STEP, live + STEP - start)
        begin_pass(caches, count)
        append(layers, count, start)
    return layers, sequence


def rows(model: Any, ranks: Ranks) -> list[dict[str, Any]]:
    counted = Counted(ranks)
    mx.eval(ranks.broadcast_tokens(mx.zeros(1, mx.uint32)))
    found = [counted.row(what="token")]
    for live in LIVE:
        for recall in ("off", "auto"):
            layers, sequence = filled(model, live, recall)
            counted = Counted(ranks)
            sequence.evict_if_due(layers, 0)
            found.append(counted.row(what="round", recall=recall, live=live))
            assert sequence.stats.rounds == 1
        found.append(look(layers, sequence, ranks, live))
    return found


def look(layers: list[CompressedKVCache], sequence: LayerGroup, ranks: Ranks, live: int) -> dict[str, Any]:
    sequence.capture_queries(range(len(layers)), rounds=True)
    for layer in layers:
        sequence.listeners(layer.number, 0, 0)[0].notify(
            mx.random.normal((1, 2, QUERIES, 128), key=mx.random.key(7)), 0.1
        )
    counted = Counted(ranks)
    sequence.replace_recalled(layers, sequence.search_archive(layers, QUERIES, 128).blocks)
    return counted.row(what="look", archived=len(sequence.archived), live=live)


def main() -> None:
    ranks = join()
    model, _ = load(ranks=ranks)
    found = rows(model, ranks)
    if ranks.is_first:
        command = f"mlx.launch -n {ranks.size} --backend ring -- python -m benchmarks.studies.rank_agreement"
        save("ranks_agreement.json", command, ranks=ranks.size, rows=found)
        sys.stdout.write(f"{json.dumps(found, indent=1)}\n")


if __name__ == "__main__":
    main()
