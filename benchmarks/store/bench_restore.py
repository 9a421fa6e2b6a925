"""Measure how long a prompt of the prefix cache takes to restore, compared with its prefill.

    python -m benchmarks.store.bench_restore --model smollm2 --tokens 4096
    python -m benchmarks.store.bench_restore --model FOLDER --tokens 32768     # benchmarks.models.random_long

A prompt is restored as a whole, and as a prefix of a prompt that diverges after its last eighth; the tokens that are
prefilled again then count. Files are in the page cache of the operating system.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx

from benchmarks.reports import save
from mlx_tq.cli.inputs import load_text
from mlx_tq.config import KVConfig
from mlx_tq.models import load
from mlx_tq.prefix_cache.folder import Folder
from mlx_tq.prefix_cache.prefix_cache import CachedPrompt, PrefixCache
from mlx_tq.prompt_cache.capacity import all_arrays
from mlx_tq.prompt_cache.compressed import compressed_attention, make_prompt_cache, plan_caches
from mlx_tq.session.restore import prefill

STEP = 2048


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def measure(model: Any, ids: list[int], rounds: int, folder: Path) -> dict[str, Any]:
    config, other = KVConfig.from_profile("balanced"), [*ids[: 7 * len(ids) // 8], *ids[: len(ids) // 8][::-1]]
    caches = make_prompt_cache(model, config)
    prefilled, _ = timed(lambda: prefill(model, caches, ids, STEP))
    prefix_cache = PrefixCache(model, plan_caches(model, config), Folder(folder), print)
    stored, _ = timed(lambda: CachedPrompt(prefix_cache, ids).store(ids, caches))

    def restore(prompt_ids: list[int]) -> int:
        prompt = CachedPrompt(prefix_cache, prompt_ids)
        restored = prompt.restore()
        mx.eval(all_arrays(restored or []))
        return prompt.restored

    whole = [timed(lambda: restore(ids)) for _ in range(rounds)]
    part = [timed(lambda: restore(other)) for _ in range(rounds)]
    return {
        "tokens": len(ids),
        "bytes": sum(record.size for record in Folder(folder).records()),
        "prefill": round(prefilled, 3),
        "store": round(stored, 4),
        "restore": round(median(seconds for seconds, _ in whole), 4),
        "share of prefill": round(median(seconds for seconds, _ in whole) / prefilled, 5),
        "restore a prefix": round(median(seconds for seconds, _ in part), 4),
        "prefilled again": 7 * len(ids) // 8 - part[0][1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    model, tokenizer = load(args.model, dtype="float32", dequantize=True)
    text = tokenizer.encode(load_text())
    figures = []
    with compressed_attention(model):
        for count in args.tokens:
            ids = (text * (count // len(text) + 1))[:count]
            with tempfile.TemporaryDirectory() as folder:
                figures.append(measure(model, ids, args.rounds, Path(folder) / "store"))
            print(json.dumps(figures[-1]))
    name = Path(args.model).stem
    command = f"python -m benchmarks.store.bench_restore --model {name} --tokens {' '.join(map(str, args.tokens))}"
    save(f"store_restore_{name}.json", command, model=name, rounds=args.rounds, figures=figures)


if __name__ == "__main__":
    main()
