"""Measure a prefix cache of 100,000 records: start, lookup of a prompt of 32K tokens, eviction, start after a crash.

    python -m benchmarks.store.bench_index

Records are files of 64 bytes, because their number is what costs. Lookups are of a prompt whose first 24K tokens are
stored, and of one that is not.
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
from mlx_tq.prefix_cache.prefix_cache import step_keys

RECORDS, TOKENS, STEP, TIMES = 100_000, 32_768, 512, 5


def timed(work, times=TIMES):
    seconds, found = [], None
    for _ in range(times):
        started = time.perf_counter()
        found = work()
        seconds.append(time.perf_counter() - started)
    return round(median(seconds), 4), found


def main():
    argparse.ArgumentParser(description=__doc__).parse_args()  # --help alone; it has no flags
    prompt = np.random.default_rng(0).integers(0, 50_000, TOKENS).tolist()
    keys = list(step_keys("begin", [prompt], STEP).values())
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "store"
        folder = Folder(path)
        with folder.writing():
            for number in range(RECORDS - len(keys)):
                kind = CHECKPOINTS if number % 5 == 0 else BLOCKS
                folder.write(kind, f"{number:064x}", bytes(64))
            for key in keys[: 3 * len(keys) // 4]:
                folder.write(CHECKPOINTS, key, bytes(64))

        def look(begin):
            ends = step_keys(begin, [prompt], STEP)
            return next((stop for stop, key in reversed(ends.items()) if folder.has(CHECKPOINTS, key)), 0)

        def start():
            opened = Folder(path)
            with opened.writing() as may:
                assert may
                return opened.read(CHECKPOINTS, keys[0])

        def after_a_crash():
            (path / "lock").write_bytes(b"")
            return start()

        found, there = timed(lambda: look("begin"))
        missed, nothing = timed(lambda: look("another"))
        assert (there, nothing) == (STEP * (3 * len(keys) // 4), 0)
        begun, _ = timed(start)
        counted, _ = timed(after_a_crash)
        listed, records = timed(folder.records)
        folder.limit = sum(record.size for record in records) // 2

        def shrink():
            with folder.writing():
                folder.write(BLOCKS, "f" * 64, bytes(64))

        left, _ = timed(shrink, 1)
        assert sum(record.size for record in folder.records()) <= folder.limit
    figures = {
        "lookup, there": found,
        "lookup, not there": missed,
        "start": begun,
        "start after a crash": counted,
        "list": listed,
        "half of it leaves": left,
    }
    print(json.dumps(figures))
    sizes = {"records": RECORDS, "tokens": TOKENS, "step": STEP}
    save("store_index.json", "python -m benchmarks.store.bench_index", **sizes, seconds=figures)


if __name__ == "__main__":
    main()
