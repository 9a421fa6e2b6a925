"""Measure seconds for rows to move from memory to disk and back, compared with plain copies.

    python -m benchmarks.store.bench_tiers

The shape is that of the published table: 36 layers, 8 KV heads of 128; 64, 256 and 1,024 blocks of 16 tokens, in the
formats of `small`. Rows go to the archive, as in a round, or to the prefix cache. Archive and plain file end with
fsync, the prefix cache with one of its last record. Files are read from the system's page cache, and without it.
"""

import argparse
import json
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

import mlx.core as mx
import numpy as np

from benchmarks.reports import save
from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.codec.normalization import MEAN_TOKENS
from mlx_tq.config import Budget, EvictConfig, KVConfig
from mlx_tq.prefix_cache.checkpoint import Checkpoint, decode_checkpoint
from mlx_tq.prefix_cache.folder import BLOCKS, CHECKPOINTS, Folder
from mlx_tq.prefix_cache.prefix_cache import derive_key
from mlx_tq.prompt_cache.layer_group import EvictionPlan, LayerGroup

LAYERS, HEADS, DIM, BLOCK = 36, 8, 128, 16
COUNTS = (64, 256, 1024)
TIMES = 1
TOGETHER = 256  # tokens that a round spills


def layers(tokens):
    """Return caches with so many packed tokens: those of a short text, repeated."""
    config = KVConfig.from_profile("small")
    spec = CacheSpec.for_layer(config, 0, config.key, config.value)
    begun = CompressedKVCache(spec)
    pair = [mx.random.normal((1, HEADS, config.sinks + 1024, DIM)).astype(mx.float16) for _ in range(2)]
    begun.append(*pair)
    begun.stop_learning()
    state = begun.state
    times, more = -(-tokens // state["rows"].shape[2]), tokens - state["rows"].shape[2]
    each = []
    for _ in range(LAYERS):
        rows, means = (mx.tile(x, (1, 1, times, 1)) for x in (state["rows"], state["normalizer"]["means"]))
        longer = {
            "rows": rows[:, :, :tokens],
            "normalizer": state["normalizer"] | {"means": means[:, :, : -(-tokens // MEAN_TOKENS)]},
            "length": state["length"] + more,
            "originals": state["originals"] + more,
        }
        each.append(CompressedKVCache.from_state(state | longer))
    mx.eval([cache.state for cache in each])
    return each


def timed(work):
    started = time.perf_counter()
    found = work()
    return time.perf_counter() - started, found


def through_archive(caches, tokens):
    sequence = LayerGroup(EvictionPlan(EvictConfig("recency", recall="auto"), Budget(tokens=1024), LAYERS), {})

    def spill():
        for start in range(0, tokens, TOGETHER):
            sequence._archive_rows(caches, np.arange(start, start + TOGETHER))
            sequence.archive.wait_for_queue()
        sequence.archive.settle()
        os.fsync(sequence.archive._file)

    spilled, _ = timed(spill)
    positions = caches[0].packed_positions
    for cache in caches:
        mx.eval(cache.compact(np.arange(0, 0), positions[:0]))
    warmed, count = timed(partial(sequence.recall, caches, sequence.archived))
    assert count == tokens, (count, sequence.archive.warning)
    return {"spill": spilled, "warm": warmed}, sequence.archive.nbytes


def through_store(caches, folder):
    names = []

    def spill():
        checkpoint = Checkpoint(caches, range(caches[0].offset))
        with folder.writing():
            for number in range(checkpoint.num_blocks):
                data = checkpoint.block(number)
                names.append(derive_key("", data))
                folder.write(BLOCKS, names[-1], data)
            key = "0" * 64
            folder.write(CHECKPOINTS, key, record := checkpoint.record("root", names))
            folder.sync(key)
        return record

    def warm():
        found, _ = decode_checkpoint(record, folder.read_block)
        mx.eval([cache.state for cache in found])
        return found

    spilled, record = timed(spill)
    warmed, _ = timed(warm)
    drop(folder.path)
    cold, _ = timed(warm)
    folder.clear()
    return {"spill": spilled, "warm": warmed, "warm, out of the page cache": cold}


def plainly(nbytes, folder):
    data = np.random.default_rng(0).integers(0, 255, nbytes, np.uint8)
    path = folder / "plain"

    def write():
        with path.open("wb") as file:
            file.write(data)
            os.fsync(file.fileno())

    copied, _ = timed(data.copy)
    written, _ = timed(write)
    read, _ = timed(path.read_bytes)
    drop(folder)
    cold, _ = timed(path.read_bytes)
    path.unlink()
    return {"copy": copied, "spill": written, "warm": read, "warm, out of the page cache": cold}


def drop(folder):
    """Drop the files of a folder from the page cache, where the system allows it."""
    for path in folder.rglob("*"):
        if path.is_file() and hasattr(os, "posix_fadvise"):
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main():
    argparse.ArgumentParser(description=__doc__).parse_args()  # --help alone; it has no flags
    figures = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for blocks in COUNTS:
            tokens, runs = blocks * BLOCK, []
            for _ in range(TIMES):
                archived, nbytes = through_archive(layers(tokens), tokens)
                stored = through_store(layers(tokens), Folder(folder / "store"))
                runs.append({"archive": archived, "store": stored, "plain": plainly(nbytes, folder)})
            arms = {
                arm: {what: round(median(run[arm][what] for run in runs), 4) for what in runs[0][arm]}
                for arm in runs[0]
            }
            figures.append({"blocks": blocks, "tokens": tokens, "nbytes": nbytes, **arms})
            print(json.dumps(figures[-1]), flush=True)
    save("store_tiers.json", "python -m benchmarks.store.bench_tiers", times=TIMES, figures=figures)


if __name__ == "__main__":
    main()
