"""Measure a prefix cache of 100,000 records: first and later lookups of a prompt of 32K tokens, removal, a crash.

    python -m benchmarks.store.bench_index

One record in twenty is a checkpoint of 2K to 32K tokens, the others are blocks, which checkpoints name. Blocks are
files of 64 bytes, because their number is what costs. The prompt shares 24K tokens with one of the checkpoints.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.reports import save
from mlx_tq.prefix_cache.folder import BLOCKS, CHECKPOINTS, Folder
from mlx_tq.prefix_cache.prefix_cache import common_prefix
from mlx_tq.prefix_cache.summary import Summary

RECORDS, TOKENS, STEP, TIMES = 100_000, 32_768, 2048, 5
PARTS = TOKENS // STEP
BLOCKS_OF_A_PROMPT = 19 * PARTS


def timed(work, times=TIMES):
    seconds, found = [], None
    for _ in range(times):
        started = time.perf_counter()
        found = work()
        seconds.append(time.perf_counter() - started)
    return round(median(seconds), 4), found


def write_prompts(folder):
    """Write prompts, each with a checkpoint at the end of each step; return the tokens of one."""
    chance = np.random.default_rng(0)
    with folder.writing():
        for prompt in range(RECORDS // (20 * PARTS)):
            tokens = chance.integers(0, 50_000, TOKENS).astype(np.int32)
            blocks = tuple(f"{prompt * BLOCKS_OF_A_PROMPT + number:064x}" for number in range(BLOCKS_OF_A_PROMPT))
            for block in blocks:
                folder.write(BLOCKS, block, bytes(64))
            for part in range(1, PARTS + 1):
                summary = Summary("root", tokens[: part * STEP], blocks[: part * 19], 32, has_prefixes=True)
                folder.write(CHECKPOINTS, f"{prompt * PARTS + part:064x}", summary.to_bytes())
    return tokens


def main():
    argparse.ArgumentParser(description=__doc__).parse_args()  # --help alone; it has no flags
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "store"
        folder = Folder(path)
        prompt = write_prompts(folder)
        prompt[3 * TOKENS // 4 :] = -1

        def look(opened):
            return max(common_prefix(summary.tokens, prompt) for summary in opened.checkpoints().values())

        def after_a_crash():
            (path / "lock").write_bytes(b"")
            with Folder(path).writing() as may:
                assert may

        first, there = timed(lambda: look(Folder(path)))
        look(folder)
        later, _ = timed(lambda: look(folder))
        assert there == 3 * TOKENS // 4
        counted, _ = timed(after_a_crash)
        folder.limit = sum(record.size for record in folder.records()) // 2

        def shrink():
            with folder.writing():
                folder.make_room(0, [])

        left, _ = timed(shrink, 1)
        assert sum(record.size for record in folder.records()) <= folder.limit
    figures = {
        "first lookup": first,
        "later lookup": later,
        "first write after a crash": counted,
        "half of it is removed": left,
    }
    print(json.dumps(figures))
    sizes = {"records": RECORDS, "tokens": TOKENS, "step": STEP}
    save("store_index.json", "python -m benchmarks.store.bench_index", **sizes, seconds=figures)


if __name__ == "__main__":
    main()
