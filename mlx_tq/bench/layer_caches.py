"""The caches of one layer that are timed: mlx-lm's own, its quantized ones and compressed ones, of random tokens.

Values are scaled so that outputs stay as large as queries, and can be the next queries.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.base import quantized_scaled_dot_product_attention
from mlx_lm.models.cache import KVCache

from mlx_tq.bench.timing import ChainTimes, Step, run_chain
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.codec.formats.base import dtype_of
from mlx_tq.codec.normalization import MEAN_TOKENS, KeyNormalization
from mlx_tq.codec.rows import RowLayout
from mlx_tq.config import BLOCK, KVConfig
from mlx_tq.kernels import backend
from mlx_tq.kernels.attend import attend
from mlx_tq.kernels.encode import encode
from mlx_tq.kernels.prefill import prefill
from mlx_tq.kernels.regions import Regions

CHECKED_TOKENS = 4096  # up to this many, a compressed arm is also compared with its reference implementation
_PERIOD = 1024  # tokens that are encoded; packed rows repeat from there on
_GROUP_SIZE = 64  # of mlx-lm's quantized caches
_SETTLING = 0.7  # share of the variance that outputs keep, so that they settle
_QUEUED_TOKENS = 256  # capacity for the tokens that an arm with `writes` appends


class LayerShape(NamedTuple):
    query_heads: int
    kv_heads: int
    head_dim: int


class Cell(NamedTuple):
    """A size to measure: `batch` sequences of `tokens` in the cache, and `length` queries of each head."""

    shape: LayerShape
    tokens: int
    batch: int = 1
    length: int = 1

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": self.shape.head_dim**-0.5, "mask": "causal" if self.length > 1 else None}


@dataclass(frozen=True)
class LayerArm:
    """A compressed cache, mlx-lm's quantized one (`kv_bits`), or its plain one.

    With `writes`, tokens are appended as mlx-lm appends them: while the step before is still being computed, so that
    each write copies the buffer. With `decodes`, a compressed cache is decoded for mlx's own attention, as for prompts.
    """

    name: str
    dtype: str = "float16"
    config: KVConfig | None = None
    kv_bits: int | None = None
    writes: bool = False
    decodes: bool = False


class Problem(NamedTuple):
    time: Callable[[int], ChainTimes]  # of a call, from the least number of calls to make
    nbytes: int
    difference: float | None = None


def cache_nbytes(cell: Cell, arm: LayerArm) -> int:
    _, heads, dim = cell.shape
    dtype = dtype_of(arm.dtype)
    rows, plain = cell.batch * heads, 2 * dim * dtype.size
    if arm.config is not None:
        _, full = _full_tokens(cell, arm.config)
        return rows * ((cell.tokens - full) * _layout(arm, dim).nbytes + full * plain)
    if arm.kv_bits is not None:
        return rows * cell.tokens * 2 * (dim * arm.kv_bits // 8 + dim // _GROUP_SIZE * 2 * dtype.size)
    return rows * (cell.tokens + _QUEUED_TOKENS * arm.writes) * plain


def make_problem(cell: Cell, arm: LayerArm, count: int) -> Problem:
    heads, _, dim = cell.shape
    queries = (0.6 * mx.random.normal((cell.batch, heads, cell.length, dim))).astype(dtype_of(arm.dtype))
    mx.eval(queries)
    if arm.config is not None:
        return _compressed(cell, arm, arm.config, queries, count)
    keys, values = _random(cell, arm, cell.tokens, cell.tokens)
    if arm.writes:
        return _written(cell, keys, values, queries, count)
    if arm.kv_bits is None:
        attention = partial(_attend_plain, options=cell.options)
        return _chain(attention, [keys, values], queries, count)
    parts = [part for x in (keys, values) for part in mx.quantize(x, _GROUP_SIZE, arm.kv_bits)]
    return _chain(partial(_attend_quantized, bits=arm.kv_bits, options=cell.options), parts, queries, count)


def _attend_plain(cache: list[mx.array], queries: mx.array, options: dict[str, Any]) -> mx.array:
    return mx.fast.scaled_dot_product_attention(queries, *cache, **options)


def _attend_quantized(cache: list[mx.array], queries: mx.array, bits: int, options: dict[str, Any]) -> mx.array:
    # mlx-lm scales the array that it is given, so it gets another one.
    queries = queries.reshape(queries.shape)
    out: mx.array = quantized_scaled_dot_product_attention(queries, cache[:3], cache[3:], bits=bits, **options)
    return out


def _chain(
    attention: Callable[[list[mx.array], mx.array], mx.array], arrays: list[mx.array], queries: mx.array, count: int
) -> Problem:
    """Return the problem of copies of a cache's arrays."""
    copies = [[array + 0 for array in arrays] for _ in range(count)]
    mx.eval(copies)
    steps: list[Step] = [partial(attention, cache) for cache in copies]
    return Problem(partial(run_chain, steps, queries), sum(array.nbytes for array in arrays))


def _written(cell: Cell, keys: mx.array, values: mx.array, queries: mx.array, count: int) -> Problem:
    caches = [KVCache() for _ in range(count)]
    for cache in caches:
        cache.state = (*(mx.pad(x, [(0, 0), (0, 0), (0, _QUEUED_TOKENS), (0, 0)]) for x in (keys, values)), cell.tokens)
        mx.eval(cache.keys, cache.values)

    def run_pass(queries: mx.array) -> mx.array:
        for cache in caches:
            new = queries[:, : cell.shape.kv_heads]
            queries = _attend_plain([*cache.update_and_fetch(new, new)], queries, cell.options)
        return queries

    def measure(calls: int) -> ChainTimes:
        passes = max(2, min(_QUEUED_TOKENS // cell.length - 2, calls // count))
        for cache in caches:
            cache.offset = cell.tokens
        current, started = run_pass(queries), 0.0
        for number in range(passes + 1):  # as in mlx_lm.generate: the next step is queued before the last has ended
            following = run_pass(current)
            mx.async_eval(following)  # type: ignore[no-untyped-call]
            mx.eval(current)
            started = started if number else time.perf_counter()
            current = following
        mx.eval(current)
        return ChainTimes(0.0, (time.perf_counter() - started) / (passes + 1) / count)

    return Problem(measure, keys.nbytes + values.nbytes)


def _compressed(cell: Cell, arm: LayerArm, config: KVConfig, queries: mx.array, count: int) -> Problem:
    """Return the problem of packed rows between sinks and window in full precision."""
    sinks, full = _full_tokens(cell, config)
    packed = cell.tokens - full
    period = min(packed, _PERIOD)
    _, heads, dim = cell.shape
    layout, encoded, normalization = _layout(arm, dim), None, None
    if config.normalize:
        means = (0.3 * mx.random.normal((cell.batch, heads, -(-packed // MEAN_TOKENS), dim))).astype(mx.float16)
        normalization = KeyNormalization(mx.ones((cell.batch, heads, dim)), means)
        encoded = KeyNormalization(normalization.scale[:1], means[:1, :, : -(-period // MEAN_TOKENS)])
    first = cell._replace(batch=1)
    rows = encode(*_random(first, arm, period, _PERIOD), layout, encoded).rows
    rows = mx.contiguous(mx.tile(rows, (cell.batch, 1, -(-packed // period), 1))[:, :, :packed])
    full_arrays = _random(cell, arm, full, _PERIOD)
    mx.eval(rows, full_arrays, normalization and (normalization.scale, normalization.means))

    def attention(cache: list[mx.array], queries: mx.array) -> mx.array:
        regions = Regions(cache[0], packed, layout, cache[1], cache[2], sinks, full, normalization)
        return (prefill if arm.decodes else attend)(queries, regions, **cell.options)

    problem = _chain(attention, [rows, *full_arrays], queries, count)
    if cell.tokens > CHECKED_TOKENS:
        return problem
    output = attention([rows, *full_arrays], queries).astype(mx.float32)
    with backend.using("reference"):
        expected = attention([rows, *full_arrays], queries).astype(mx.float32)
    return problem._replace(difference=float(mx.abs(output - expected).max() / mx.abs(expected).max()))


def _full_tokens(cell: Cell, config: KVConfig) -> tuple[int, int]:
    """Return the sinks, and all tokens in full precision, of which a short context has at most a half."""
    full = min(config.sinks + config.window + BLOCK, cell.tokens // 2)
    return min(config.sinks, full // 2), full


def _layout(arm: LayerArm, dim: int) -> RowLayout:
    config = arm.config or KVConfig()
    return CacheSpec.for_layer(config, 0, *config.formats_of(0, 1)).layout(dim, dim, dtype_of(arm.dtype))


def _random(cell: Cell, arm: LayerArm, tokens: int, different: int) -> tuple[mx.array, mx.array]:
    """Return keys, and values that keep the size of queries if `different` tokens of the cache are distinct."""
    shape = cell.batch, cell.shape.kv_heads, tokens, cell.shape.head_dim
    keys, values = (mx.random.normal(shape) for _ in range(2))
    # Softmax of unit scores keeps e / tokens of the variance of values.
    values = values * math.sqrt(_SETTLING * different / math.e)
    return keys.astype(dtype_of(arm.dtype)), values.astype(dtype_of(arm.dtype))
