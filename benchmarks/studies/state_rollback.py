"""Study what a rejected draft costs a hybrid, whose states cannot be trimmed but can be restored and recomputed.

    python -m benchmarks.studies.state_rollback --model FOLDER --json state_rollback.json

A pass that verifies a draft keeps the states before it (no copy: arrays are not changed in place). If the draft is
rejected, the states are restored, and the accepted tokens run again. The program times plain steps, verify passes and
these repeats. From them it computes the speedup over plain steps for several acceptance rates.
"""

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, make_prompt_cache, trim_prompt_cache

from benchmarks.reports import save
from benchmarks.studies.state_formats import prefill
from mlx_tq import load
from mlx_tq.cache.layer import cache_parts
from mlx_tq.cli.inputs import load_text

ROWS = (1, 2, 4, 8)  # tokens of a pass
SHARES = (0.5, 0.7, 0.9, 0.97)


def time_pass(model: Any, caches: list[Any], ids: list[int]) -> float:
    """Return the seconds of a pass, after which the caches are as before."""
    states = [part for part in cache_parts(caches) if isinstance(part, ArraysCache)]
    others = [part for part in cache_parts(caches) if not isinstance(part, ArraysCache)]
    before, started = [list(part.cache) for part in states], time.perf_counter()
    mx.eval(model(mx.array([ids]), cache=caches), [part.state for part in caches])
    seconds = time.perf_counter() - started
    for part, entries in zip(states, before, strict=True):
        part.cache = entries
    trim_prompt_cache(others, len(ids))
    return seconds


def gain(seconds: dict[int, float], rows: int, share: float) -> float:
    """Return the expected speedup over plain steps, with drafts of `rows` - 1 tokens.

    If the first wrong draft follows k accepted ones, k + 1 tokens run again.
    """
    tokens = cost = 0.0
    for accepted in range(rows):
        is_rejected = accepted < rows - 1
        chance = share**accepted * ((1 - share) if is_rejected else 1)
        repeat = min((n for n in seconds if n >= accepted + 1), default=rows)
        tokens += chance * (accepted + 1)
        cost += chance * (seconds[rows] + (seconds[repeat] if is_rejected else 0))
    return tokens * seconds[1] / cost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a hybrid")
    parser.add_argument("--length", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--passes", type=int, default=30, help="of each length; their median counts")
    parser.add_argument("--json", required=True, help="file of benchmarks/results")
    args = parser.parse_args()
    model, tokenizer = load(args.model, dtype="float32")
    ids = tokenizer.encode(load_text())[: args.length + max(ROWS)]
    caches = prefill(model, ids[: args.length], make_prompt_cache(model))
    times: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for _ in range(args.passes):
        for rows, seconds in times.items():
            seconds.append(time_pass(model, caches, ids[args.length : args.length + rows]))
    medians = {rows: median(seconds) for rows, seconds in times.items()}
    gains = [
        {"rows": rows, "right": share, "gain": gain(medians, rows, share)} for rows in ROWS[1:] for share in SHARES
    ]
    command = f"python -m benchmarks.studies.state_rollback --model {Path(args.model).name} --json {args.json}"
    save(args.json, command, seconds=medians, gains=gains)
    for row in gains:
        print(row)


if __name__ == "__main__":
    main()
