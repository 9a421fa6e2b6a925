"""Study what trellis codes cost compared with tq: lane operations on the simulator, or times on a GPU.

    python -m benchmarks.studies.trellis_costs

Counted is one more token of a KV head, in the first of attention's two kernels. Timed is one layer of Llama 3.1 8B,
together with its matrices.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from benchmarks.kernels.bench_kernels import ONE_BLOCK
from benchmarks.reports import save
from mlx_tq.bench.timing import run_chain
from mlx_tq.codec import CodecOptions, get_format
from mlx_tq.codec.rows import RowLayout
from mlx_tq.kernels import backend, thresholds
from mlx_tq.kernels.attend import attend
from mlx_tq.kernels.encode import encode
from mlx_tq.kernels.gpu import gpu_backend
from mlx_tq.kernels.regions import Regions

ROOT = Path(__file__).resolve().parents[2]
FORMATS = ("tq4", "tcq4", "tq3", "tcq3", "tq2", "tcq2")
DIMS, GROUP = (64, 128, 256), 4
COUNTED = (96, 224)  # tokens
HEADS, CONTEXT, PROMPT, LAYERS = 8, 32768, 2048, 8  # timed
CALLS, ROUNDS = 50, 7
MATRICES = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))


class Layer:
    def __init__(self, name: str, dim: int, heads: int, tokens: int) -> None:
        codecs = (get_format(name).codec(dim, CodecOptions(seed=seed, scale="unbiased")) for seed in (0, 1))
        self.layout = RowLayout(*codecs)
        shapes = [(1, heads, tokens, dim)] * 2 + [(1, GROUP * heads, 1, dim)]
        self.keys, self.values, self.queries = (mx.random.normal(shape).astype(mx.float16) for shape in shapes)

    def encoded(self) -> mx.array:
        return encode(self.keys, self.values, self.layout).rows

    def attended(self, rows: mx.array, queries: mx.array | None = None) -> mx.array:
        last = self.keys[:, :, -1:], self.values[:, :, -1:]
        regions = Regions(rows, rows.shape[2], self.layout, *last, 0, 1)
        queries = self.queries if queries is None else queries
        return attend(queries, regions, scale=self.layout.key.head_dim**-0.5)


def counted() -> dict[str, Any]:
    """Return the lane operations per token and KV head."""
    sys.path.insert(0, str(ROOT / "tests"))
    from kernels.metal.simulated import simulated  # the tests' own: no GPU is needed to count

    found = []
    for dim in DIMS:
        for name in FORMATS:
            totals = []
            for tokens in COUNTED:
                mx.random.seed(0)  # how often a maximum grows is a matter of the numbers
                layer = Layer(name, dim, 1, tokens)
                with backend.using("reference"):
                    rows = layer.encoded()
                with simulated() as counters, thresholds.using(ONE_BLOCK):
                    assert mx.array_equal(layer.encoded(), rows)
                    mx.eval(layer.attended(rows))
                totals.append([sum(each.operations.values()) for each in counters[:2]])
            each = [(b - a) / (COUNTED[1] - COUNTED[0]) for a, b in zip(*totals, strict=True)]
            found.append({"format": name, "dim": dim, "encode": each[0] / (2 * dim), "attend": each[1]})
            print(found[-1], flush=True)
    return {"queries": GROUP, "rows": found}


def seconds(call: Callable[[], list[mx.array]]) -> float:
    """Return the median seconds of a call that fills the GPU, many of which are evaluated together."""
    mx.eval(call())
    rounds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        mx.eval([call() for _ in range(CALLS)])
        rounds.append((time.perf_counter() - started) / CALLS)
    return statistics.median(rounds)


def timed() -> dict[str, Any]:
    """Return the seconds of a context's attention, of a prompt's encoding, and of a prompt's matrix products."""
    mx.random.seed(0)
    found = []
    for name in FORMATS:
        prompt = Layer(name, 128, HEADS, PROMPT)
        layers = [Layer(name, 128, HEADS, CONTEXT) for _ in range(LAYERS)]
        steps = [partial(layer.attended, layer.encoded()) for layer in layers]
        run_chain(steps, layers[0].queries, LAYERS)  # encodes and compiles
        chains = [run_chain(steps, layers[0].queries, CALLS).run for _ in range(ROUNDS)]
        row = {"format": name, "attend": statistics.median(chains)}
        found.append(row | {"encode": seconds(lambda prompt=prompt: [prompt.encoded()])})
        print(found[-1], flush=True)
    inputs = {width: mx.random.normal((PROMPT, width)).astype(mx.bfloat16) for width in (4096, 14336)}
    weights = [mx.random.normal(shape).astype(mx.bfloat16) for shape in MATRICES]
    mx.eval(inputs, weights)
    matrices = seconds(lambda: [inputs[w.shape[0]] @ w for w in weights])
    return {"heads": HEADS, "context": CONTEXT, "prompt": PROMPT, "matrices": matrices, "rows": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="default: benchmarks/results/trellis_{metal,cuda,counted}.json")
    args = parser.parse_args()
    where = gpu_backend()
    path = Path(args.json).resolve() if args.json else f"trellis_{where or 'counted'}.json"
    save(path, "python -m benchmarks.studies.trellis_costs", **(timed() if where else counted()))


if __name__ == "__main__":
    main()
