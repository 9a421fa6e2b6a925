"""Study a decode step over the latents of MLA: packed rows next to what mlx-lm's models do on their own cache.

    python -m benchmarks.studies.latents [--tokens 4096,16384]

One layer, one query token, shapes of DeepSeek V3 (rank 512, 64 rotated dims). Both ways compute the scores of rotated
parts and attend with them as a mask; the packed way decodes the rotated parts for it.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from benchmarks.reports import save
from mlx_tq.cache.latent import LatentKVCache
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.config import KVConfig
from mlx_tq.integration.patches import patch_attention
from mlx_tq.kernels import backend

RANK, ROTATED = 512, 64
HEADS = (20, 128)
FORMATS = {"q8": KVConfig("q8", "q8"), "tq4": KVConfig("tq4", "q8"), "tcq3": KVConfig("tcq3", "q8")}
ROUNDS = 9
SCALE = 192**-0.5


def random_pair(tokens: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    latents, rotated = (mx.random.normal((1, 1, tokens, dim)).astype(dtype) for dim in (RANK, ROTATED))
    return latents, rotated


def make_ways(tokens: int, heads: int, dtype: mx.Dtype) -> tuple[dict[str, Callable[[], mx.array]], dict[str, int]]:
    """Return a step in each way, and the bytes of its cache."""
    pair = random_pair(tokens, dtype)
    queries, query_rotated = (mx.random.normal((1, heads, 1, dim)).astype(dtype) for dim in (RANK, ROTATED))

    def own() -> mx.array:
        mask = (query_rotated * SCALE) @ pair[1].swapaxes(-1, -2)
        return mx.fast.scaled_dot_product_attention(queries, pair[0], pair[0], scale=SCALE, mask=mask)

    ways: dict[str, Callable[[], mx.array]] = {"own": own}
    sizes = {"own": sum(array.nbytes for array in pair)}
    for name, config in FORMATS.items():
        cache = LatentKVCache(CacheSpec.for_layer(config, 0, config.key, config.value, latent=True))
        for start in range(0, tokens, 2048):
            cache.append(*(array[:, :, start : start + 2048] for array in pair))
            mx.eval(cache.arrays())
        view = cache.append(*random_pair(1, dtype))
        mx.eval(cache.arrays())

        def packed(view: Any = view) -> mx.array:
            mask = (query_rotated * SCALE) @ view.regions.decode_values().swapaxes(-1, -2)
            return view.attend(queries, SCALE, mask, None)

        ways[name], sizes[name] = packed, cache.nbytes
    return ways, sizes


def time_ways(tokens: int, heads: int, dtype: mx.Dtype) -> dict[str, Any]:
    ways, sizes = make_ways(tokens, heads, dtype)
    times: dict[str, list[float]] = {name: [] for name in ways}
    with patch_attention():
        for _ in range(ROUNDS + 1):
            for name, step in ways.items():
                started = time.perf_counter()
                mx.eval(step())
                times[name].append(time.perf_counter() - started)
    seconds = {name: statistics.median(values[1:]) for name, values in times.items()}
    fastest = {name: min(values[1:]) for name, values in times.items()}
    return {"tokens": tokens, "heads": heads, "seconds": seconds, "fastest": fastest, "nbytes": sizes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="4096,16384")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    mx.random.seed(0)
    dtype = getattr(mx, args.dtype)
    rows = [time_ways(tokens, heads, dtype) for tokens in map(int, args.tokens.split(",")) for heads in HEADS]
    command = f"python -m benchmarks.studies.latents --tokens {args.tokens} --dtype {args.dtype}"
    save("latents_cpu.json", command, backend=backend.current(), dtype=args.dtype, rows=rows)
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
