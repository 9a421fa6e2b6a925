"""Archived tokens are on disk: a search reads a tile of them at a time.

`test_archive_memory.py N` is also the program that the test measures.
"""

import gc
import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from cli.tools import environment

from mlx_tq.cache.spec import CacheSpec
from mlx_tq.config import Budget, EvictConfig, KVConfig
from mlx_tq.prompt_cache.build import make_cache
from mlx_tq.prompt_cache.layer_group import EvictionPlan, LayerGroup, begin_pass
from mlx_tq.prompt_cache.recall import TILE, search_layers

LAYERS, HEADS, DIM, LIVE, STEP, ASKING = 6, 2, 128, 512, 512, 64
# Of a tile: packed keys as they are read and as mlx has them, decoded in two steps, and five arrays of scores.
STREAMED = TILE * HEADS * (2 * 2 * DIM + 2 * 4 * DIM + 5 * 4 * ASKING)


def anonymous_bytes():
    """Return the bytes of this process that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def measure(archived):
    """Archive so many tokens, search them, and print the memory that this process uses."""
    config = EvictConfig("recency:trigger=64:granularity=32", LIVE, "auto")
    sequence = LayerGroup(EvictionPlan(config, Budget(tokens=LIVE), LAYERS), {})
    spec = CacheSpec.for_layer(KVConfig(sinks=32, window=64), 0, "q8", "tq4")
    caches = [make_cache(spec, number, sequence) for number in range(LAYERS)]
    shape = (1, HEADS, STEP, DIM)
    for start in range(0, archived + 2 * LIVE, STEP):
        begin_pass(caches, STEP)
        for cache in caches:
            pair = [mx.random.normal(shape, key=mx.random.key(2 * start + each)) for each in (0, 1)]
            view = cache.append(*pair)
            if start == 0:
                view.attend(pair[0], 0.1, "causal", None)
            mx.eval(cache.state)
        if sequence.archive is not None:
            sequence.archive.settle()  # what waits to be written has a bound of its own
    del pair, view
    sequence.capture_queries(search_layers(LAYERS), rounds=True)
    for number in search_layers(LAYERS):
        sequence.listeners(number, 0, 0)[0].notify(mx.random.normal((1, HEADS, ASKING, DIM)), 0.125, None)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    found = sequence.search_archive(caches, ASKING, LIVE).ranked
    peak = mx.get_peak_memory() - before
    sequence.capture_queries([], rounds=True)
    gc.collect()
    mx.clear_cache()
    tokens = sum(len(scored.block.positions) for scored in found)
    live = sum(cache.nbytes for cache in caches)
    size = 0 if sequence.archive is None else sequence.archive.nbytes
    report = {"archived": tokens, "size": size, "live": live, "look": peak}
    print(json.dumps(report | {"active": mx.get_active_memory(), "anonymous": anonymous_bytes()}))


def run_measurement(tokens, folder):
    env = environment(XDG_CACHE_HOME=str(folder), MALLOC_ARENA_MAX="2")
    env["PYTHONPATH"] += f":{Path(__file__).parents[1]}"  # this file imports what tests share
    words = [sys.executable, __file__, str(tokens)]
    return json.loads(subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout)


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux says what of a process no file holds")
def test_fifty_thousand_archived_tokens_are_not_in_memory(tmp_path):
    none, many = (run_measurement(tokens, tmp_path) for tokens in (0, 50_000))
    assert many["archived"] >= 50_000
    assert many["size"] > 3 * (many["live"] + STREAMED)  # held in memory, the bounds below would fail
    assert many["look"] <= STREAMED
    assert many["active"] - none["active"] <= many["live"] + STREAMED
    assert many["anonymous"] - none["anonymous"] <= many["live"] + STREAMED
    assert [path for path in (tmp_path / "mlx_tq").iterdir() if path.name != "kernels"] == []


if __name__ == "__main__":
    measure(int(sys.argv[1]))
