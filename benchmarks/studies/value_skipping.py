"""Study how many tiles of 32 tokens have so little weight that attention need not load their values.

    python -m benchmarks.studies.value_skipping [NAME=MODEL ...] [--lengths 2048,8192] [--json FILE]
    python -m benchmarks.studies.value_skipping --counted

For the last tokens of a text, tiles are counted that all query heads of a KV head could skip while at most 2^-9 of the
sum of weights is left out: at best, and by what a kernel knows when it meets a tile. `--counted` counts on the
simulator what `attend` does with values.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from benchmarks.kernels.cases import make_cases
from benchmarks.reports import save
from mlx_tq.cli.inputs import load_text
from mlx_tq.integration.patches import patch_attention
from mlx_tq.integration.probe import model_facts, native_caches
from mlx_tq.kernels import backend, thresholds
from mlx_tq.kernels.thresholds import KernelThresholds
from mlx_tq.models import load
from mlx_tq.prompt_cache.recording import Attend, WatchedCache

ROOT = Path(__file__).resolve().parents[2]
COUNTED = (96, 224)  # tokens
# The loop over a tile's values, and one that takes none.
LOOP = "slot < tokens;", "slot < 0;"
TILE, PREFIX, WINDOW, STEP, QUERIES = 32, 128, 128, 512, 32
LEFT_OUT = 2.0**-9
BLOCKS = (64, 256, 1024)  # tokens that a simdgroup takes: it knows the sum of those it has met
BELOW = (1e-4, 1e-6)  # of the sum, a tile's largest weight


def watched(found: dict[str, list[float]]) -> Attend:
    """Return attention that adds to `found` the shares of tiles that could be skipped."""

    def attend(
        queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array:
        length = queries.shape[2]
        if length == QUERIES:
            heads, past = keys.shape[1], keys.shape[2] - length
            grouped = queries.reshape(1, heads, -1, length, keys.shape[3])
            scores = grouped.astype(mx.float32) * scale @ keys[:, :, None].astype(mx.float32).swapaxes(-1, -2)
            later = mx.arange(keys.shape[2])[None] > past + mx.arange(length)[:, None]
            weights = np.array(mx.softmax(mx.where(later, -mx.inf, scores), axis=-1)[0])
            for name, share in skipped(weights[..., PREFIX : past - WINDOW]).items():
                found.setdefault(name, []).append(share)
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)

    return attend


def skipped(weights: np.ndarray) -> dict[str, float]:
    """Return the shares of tiles that each rule skips, of softmax weights [H, G, L, S]."""
    heads, group, length, tokens = weights.shape
    tiles = weights[..., : tokens // TILE * TILE].reshape(heads, group, length, -1, TILE)
    mass, peak = tiles.sum(axis=-1), tiles.max(axis=-1)
    found = {f"below {limit:g}": float((peak < limit).all(axis=1).mean()) for limit in BELOW}
    order = np.argsort(mass.max(axis=1), axis=-1)[:, None]
    ascending = np.take_along_axis(mass, np.broadcast_to(order, mass.shape), axis=-1).cumsum(axis=-1)
    found["at best"] = float((ascending <= LEFT_OUT).all(axis=1).mean())
    for size in (size for size in BLOCKS if size <= tokens):
        found[f"in blocks of {size}"] = float(np.mean([known(block) for block in cut(mass, size // TILE)]))
    return found


def cut(mass: np.ndarray, count: int) -> list[np.ndarray]:
    return [mass[..., i : i + count] for i in range(0, mass.shape[-1] - count + 1, count)]


def known(mass: np.ndarray) -> float:
    """Return the share of tiles [H, G, L, n] that a kernel skips which meets them in order and keeps to the bound."""
    total, left = np.zeros(mass.shape[:-1]), np.zeros(mass.shape[:-1])
    count = 0.0
    for i in range(mass.shape[-1]):
        total += mass[..., i]
        skip = (left + mass[..., i] <= LEFT_OUT * total).all(axis=1, keepdims=True)
        left += np.where(skip, mass[..., i], 0)
        count += skip.mean()
    return count / mass.shape[-1]


def measure(label: str, folder: str | None, lengths: list[int]) -> list[dict[str, Any]]:
    model, tokenizer = load(folder, dtype="float32", dequantize=True)
    ids = mx.array(tokenizer.encode(load_text(), add_special_tokens=False)[: max(lengths)])
    rows = []
    for length in lengths:
        caches = native_caches(model)
        whole = [slot.index for slot in model_facts(model).slots if type(caches[slot.index]) is KVCache]
        found: dict[str, list[float]] = {}
        for index in whole:
            caches[index] = WatchedCache(watched(found))
        with patch_attention():
            for start in range(0, length - QUERIES, STEP):
                stop = min(start + STEP, length - QUERIES)
                mx.eval(model(ids[None, start:stop], cache=caches))
            mx.eval(model(ids[None, length - QUERIES : length], cache=caches))
        shares = {name: 100 * float(np.mean(values)) for name, values in found.items()}
        most = 100 * max(found[f"in blocks of {BLOCKS[1]}"])
        rows.append({"model": label, "tokens": length, "layers": len(whole), **shares, "most of a layer": most})
        print(rows[-1], flush=True)
    return rows


def counted() -> list[dict[str, Any]]:
    """Count lane operations and bytes of `attend` per token and KV head, with and without the loop over values."""
    sys.path.insert(0, str(ROOT / "tests"))
    from kernels.metal.simulated import simulated

    rows = []
    for name, edit in (("attend", str), ("attend, no values", lambda text: text.replace(*LOOP))):
        costs = []
        for tokens in COUNTED:
            with backend.using("reference"):
                (case,) = (case for case in make_cases(tokens, 1) if case.kernel == "attend")
            with simulated(edit=edit) as counters, thresholds.using(KernelThresholds(min_block=4096, short_tokens=0)):
                mx.eval(case.call())
            costs.append((sum(counters[0].operations.values()), counters[0].loaded["packed_rows_0"]))
        more = COUNTED[1] - COUNTED[0]
        operations, loaded = ((many - few) / more for few, many in zip(*costs, strict=True))
        rows.append({"kernel": name, "lane_operations": operations, "loaded": loaded})
        print(rows[-1], flush=True)
    assert rows[1]["lane_operations"] < rows[0]["lane_operations"], f"no loop has {LOOP[0]!r}"
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["embedded="], metavar="NAME=MODEL")
    parser.add_argument("--lengths", default="2048")
    parser.add_argument("--json", default="value_skipping.json", help="file of benchmarks/results, or a whole path")
    parser.add_argument("--counted", action="store_true")
    args = parser.parse_args()
    if args.counted:
        save("value_skipping_counted.json", "python -m benchmarks.studies.value_skipping --counted", rows=counted())
        return
    lengths = [int(length) for length in args.lengths.split(",")]
    rows = []
    for model in args.models:
        label, _, folder = model.partition("=")
        rows += measure(label, folder or None, lengths)
    save(args.json, "python -m benchmarks.studies.value_skipping", rows=rows)


if __name__ == "__main__":
    main()
