"""Time one layer's decode attention on a GPU: mlx's own, mlx-lm's quantized caches and compressed caches.

The queries of each call are the output of the call before, so calls cannot overlap; values are scaled so that outputs
stay as large as queries. Calls take turns among copies of the cache, so that the GPU's own cache does not serve it.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.base import quantized_scaled_dot_product_attention

from mlx_tq.codec.formats import CodecOptions, get_format
from mlx_tq.codec.normalization import MEAN_TOKENS, KeyNormalization
from mlx_tq.codec.rows import RowLayout
from mlx_tq.kernels import backend
from mlx_tq.kernels.attend import attend
from mlx_tq.kernels.encode import encode
from mlx_tq.kernels.regions import Regions

# Query heads, KV heads, head_dim.
SHAPES = {
    "Qwen3": (32, 8, 128),
    "Qwen3.5 24/4": (24, 4, 256),
    "Qwen3.5 16/2": (16, 2, 256),
    "Qwen3.5 16/4": (16, 4, 256),
    "Gemma 3": (4, 1, 256),
    "gpt-oss": (64, 8, 64),
}
TOKENS = (1024, 4096, 16384, 65536, 131072)
NORMALIZED = ", normalized"
ARMS = ("fp16", "kv-bits 8", "kv-bits 4", "q8/tq4", "tq4/tq4", "tq2/tq2", "tcq3/tcq3", "tq4/tq4" + NORMALIZED)
SEVERAL = ("fp16", "q8/tq4", "tq4/tq4")  # arms of batches and of several queries

SINKS, FULL_TOKENS = 128, 288  # tokens in full precision: the first ones, and all
PERIOD = 1024  # tokens that are encoded; packed rows repeat from there on
COLD_BYTES, COPIES = 192 << 20, 64  # what calls take turns among: so many bytes, at most so many copies
SECONDS, CALLS, ROUNDS = 0.012, 256, 5  # of a chain of calls: its length, at most so many calls, and how often
SETTLING = 0.7  # share of the variance that outputs keep, so that they settle

Step = Callable[[mx.array], mx.array]


class Cell(NamedTuple):
    """What is measured: `batch` sequences of `tokens` in the cache, `length` queries of each."""

    shape: str
    tokens: int
    batch: int = 1
    length: int = 1

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": SHAPES[self.shape][2] ** -0.5, "mask": "causal" if self.length > 1 else None}


class Problem(NamedTuple):
    steps: list[Step]  # one for each copy of the cache
    nbytes: int  # of one copy
    reference: Step


def cells() -> Iterator[tuple[Cell, tuple[str, ...]]]:
    """Yield what is measured with its arms, the most useful first."""
    yield from ((Cell(shape, tokens), ARMS) for tokens in TOKENS for shape in SHAPES)
    yield from ((Cell(shape, n, length=m), SEVERAL) for n in (4096, 65536) for m in (4, 8) for shape in SHAPES)
    yield from ((Cell(shape, n, batch=8), SEVERAL) for n in (4096, 16384, 65536, 1024) for shape in SHAPES)


def measure(arm: str, cell: Cell, rounds: int = ROUNDS) -> dict[str, Any]:
    """Return the median seconds of a call, and for short contexts the difference from the reference.

    Building a call takes Python time, too: `build_seconds`, before the chain runs.
    """
    mx.random.seed(0)
    problem = (_compressed if "/" in arm else _quantized if "kv" in arm else _plain)(arm, cell)
    heads, _, dim = SHAPES[cell.shape]
    queries = (0.6 * mx.random.normal((cell.batch, heads, cell.length, dim))).astype(mx.float16)
    mx.eval(queries)
    row: dict[str, Any] = {"arm": arm, **cell._asdict(), "nbytes": problem.nbytes}
    if cell.tokens <= 16384:
        output, expected = (step(queries).astype(mx.float32) for step in (problem.steps[0], problem.reference))
        row["difference"] = float(mx.abs(output - expected).max() / mx.abs(expected).max())
    for calls in (2, 6):  # compiles and warms up
        _, seconds = _run_chain(problem.steps, queries, calls)
    calls = max(4, min(CALLS, int(SECONDS / seconds)))
    building, running = zip(*(_run_chain(problem.steps, queries, calls) for _ in range(rounds)), strict=True)
    row |= {"seconds": statistics.median(running), "low": min(running), "high": max(running)}
    return row | {"build_seconds": statistics.median(building), "gb_per_s": problem.nbytes / row["seconds"] / 1e9}


def measure_copy(nbytes: int = 1 << 29) -> dict[str, float]:
    """Return the rate of a plain copy, read and written bytes, and the seconds of a small operation."""
    medians = []
    for array, calls in ((mx.zeros(nbytes // 4, mx.uint32), 10), (mx.zeros(1024), 500)):
        rounds = [_run_chain([lambda last: last + 1], array, calls)[1] for _ in range(ROUNDS + 1)]
        medians.append(statistics.median(rounds[1:]))
    return {"copy_gb_per_s": 2 * nbytes / medians[0] / 1e9, "small_operation_seconds": medians[1]}


def _run_chain(steps: list[Step], queries: mx.array, calls: int) -> tuple[float, float]:
    """Return the seconds per call to build a chain of calls, and to run it."""
    started = time.perf_counter()
    for number in range(calls):
        queries = steps[number % len(steps)](queries)
    built = time.perf_counter()
    mx.eval(queries)
    return (built - started) / calls, (time.perf_counter() - built) / calls


def _random(cell: Cell, tokens: int, batch: int, different: int) -> tuple[mx.array, mx.array]:
    """Return keys, and values that keep the size of queries if so many tokens of the cache are different."""
    _, heads, dim = SHAPES[cell.shape]
    keys, values = (mx.random.normal((batch, heads, tokens, dim)) for _ in range(2))
    # Softmax of unit scores keeps e / tokens of the variance of values.
    return keys.astype(mx.float16), (values * math.sqrt(SETTLING * different / math.e)).astype(mx.float16)


def _copies(arrays: list[mx.array]) -> tuple[list[list[mx.array]], int]:
    nbytes = sum(array.nbytes for array in arrays)
    copies = [[array + 0 for array in arrays] for _ in range(max(1, min(COPIES, -(-COLD_BYTES // nbytes))))]
    mx.eval(copies)
    return copies, nbytes


def _plain(arm: str, cell: Cell) -> Problem:
    keys, values = _random(cell, cell.tokens, cell.batch, cell.tokens)
    caches, nbytes = _copies([keys, values])

    def step(cache: list[mx.array]) -> Step:
        return lambda queries: mx.fast.scaled_dot_product_attention(queries, *cache, **cell.options)

    return Problem([step(cache) for cache in caches], nbytes, lambda queries: _exact(queries, keys, values, cell))


def _quantized(arm: str, cell: Cell) -> Problem:
    bits = int(arm[-1])
    packed = [mx.quantize(x, group_size=64, bits=bits) for x in _random(cell, cell.tokens, cell.batch, cell.tokens)]
    caches, nbytes = _copies([part for parts in packed for part in parts])

    def step(cache: list[mx.array]) -> Step:
        # mlx-lm scales the array that it is given, so it gets another one.
        return lambda queries: quantized_scaled_dot_product_attention(
            queries.reshape(queries.shape), cache[:3], cache[3:], bits=bits, **cell.options
        )

    keys, values = (mx.dequantize(*parts, group_size=64, bits=bits) for parts in packed)
    return Problem([step(cache) for cache in caches], nbytes, lambda queries: _exact(queries, keys, values, cell))


def _exact(queries: mx.array, keys: mx.array, values: mx.array, cell: Cell) -> mx.array:
    """Attend in fp32 operations."""
    batch, heads, tokens, dim = keys.shape
    grouped = queries.astype(mx.float32).reshape(batch, heads, -1, dim) * cell.options["scale"]
    scores = grouped @ keys.astype(mx.float32).swapaxes(-1, -2)
    if cell.length > 1:
        visible = mx.arange(tokens) <= tokens - cell.length + mx.arange(cell.length)[:, None]
        scores = mx.where(visible, scores.reshape(batch, -1, cell.length, tokens), -mx.inf).reshape(scores.shape)
    return (mx.softmax(scores, axis=-1) @ values.astype(mx.float32)).reshape(queries.shape)


def _compressed(arm: str, cell: Cell) -> Problem:
    packed = cell.tokens - FULL_TOKENS
    period = min(packed, PERIOD)
    _, heads, dim = SHAPES[cell.shape]
    names = arm.removesuffix(NORMALIZED).split("/")
    codecs = (get_format(name).codec(dim, CodecOptions(seed=seed), mx.float16) for seed, name in enumerate(names))
    layout, first, normalization = RowLayout(*codecs), None, None
    if arm.endswith(NORMALIZED):
        means = (0.3 * mx.random.normal((cell.batch, heads, -(-packed // MEAN_TOKENS), dim))).astype(mx.float16)
        normalization = KeyNormalization(mx.ones((cell.batch, heads, dim)), means)
        first = KeyNormalization(normalization.scale[:1], means[:1, :, : -(-period // MEAN_TOKENS)])
    with backend.using("reference"):
        rows = encode(*_random(cell, period, 1, PERIOD), layout, first).rows
    rows = mx.contiguous(mx.tile(rows, (cell.batch, 1, -(-packed // period), 1))[:, :, :packed])
    caches, nbytes = _copies([rows, *_random(cell, FULL_TOKENS, cell.batch, PERIOD)])
    regions = [Regions(r, packed, layout, k, v, SINKS, FULL_TOKENS, normalization) for r, k, v in caches]

    def step(of_copy: Regions) -> Step:
        return lambda queries: attend(queries, of_copy, **cell.options)

    def reference(queries: mx.array) -> mx.array:
        with backend.using("reference"):
            return attend(queries, regions[0], **cell.options)

    return Problem([step(of_copy) for of_copy in regions], nbytes, reference)
