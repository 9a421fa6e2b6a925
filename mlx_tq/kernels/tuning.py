"""Measures the thresholds of `kernels.thresholds` on this machine, one at a time, by the medians of several rounds.

`packed_queries`, `short_tokens` and `matrix_queries` are limits between two ways to attend: they are raised while the
way below the limit is faster. The reference backend uses `packed_queries` only.
"""

import statistics
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import NamedTuple

import mlx.core as mx

from mlx_tq.codec.formats import CodecOptions, get_format
from mlx_tq.codec.rows import RowLayout
from mlx_tq.kernels import backend, thresholds
from mlx_tq.kernels.attend import attend
from mlx_tq.kernels.encode import encode
from mlx_tq.kernels.prefill import prefill
from mlx_tq.kernels.regions import Regions
from mlx_tq.kernels.thresholds import KernelThresholds

SHORT_TOKENS = (320, 384, 512, 768, 1024, 1536, 2048, 4096)
MATRIX_QUERIES = (24, 32, 40, 64, 128)  # query rows of a KV head; each is measured with 8 fewer
PACKED_QUERIES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
CANDIDATES = {
    "simdgroups": (128, 256, 512, 1024, 2048, 4096, 8192),
    "min_block": (32, 64, 128, 256),
    "merge_simdgroups": (1, 2, 4, 8),
    "level_tables": (0, 1, 2),
}
_HEADS, _GROUP, _DIM = 8, 4, 128
_FULL_TOKENS = 256
_FEWEST_ROWS = 8  # of a product of matrices
_SECONDS = 0.05  # of chained calls in one measurement

# A threshold's name, a value, its figure, and the best thresholds so far.
Step = tuple[str, int, float, KernelThresholds]


class Case(NamedTuple):
    regions: Regions
    run: Callable[..., mx.array]  # attend or prefill
    queries: int
    limits: KernelThresholds


def tune(tokens: list[int], rounds: int) -> Iterator[Step]:
    """Measure each threshold at contexts of these packed tokens (`short_tokens` at its own), tq4 in fp16.

    The figure of a step is the seconds summed over the contexts; for limits, how many times faster the way below is.
    """
    best = thresholds.current()
    caches = [_make_cache(count) for count in tokens]
    if backend.current() != "reference":
        best = replace(best, short_tokens=0)
        for name, values in CANDIDATES.items():
            candidates = [replace(best, **{name: value}) for value in values]
            seconds = _time_cases([Case(cache, attend, 1, limits) for limits in candidates for cache in caches], rounds)
            totals = [sum(seconds[i : i + len(tokens)]) for i in range(0, len(seconds), len(tokens))]
            best = candidates[totals.index(min(totals))]
            for value, total in zip(values, totals, strict=True):
                yield name, value, total, best

        def one_or_two_kernels(count: int, best: KernelThresholds) -> list[float]:
            cache = _make_cache(count - _FULL_TOKENS)
            return _time_cases([Case(cache, attend, 1, replace(best, short_tokens=n)) for n in (count, 0)], rounds)

        best = yield from _raise_limit("short_tokens", SHORT_TOKENS, best, one_or_two_kernels)
    if backend.current() == "metal":

        def vectors_or_matrices(count: int, best: KernelThresholds) -> list[float]:
            limits = [replace(best, short_tokens=0, matrix_queries=n) for n in (count, _FEWEST_ROWS)]
            length = (count - _FEWEST_ROWS) // _GROUP
            groups = [[Case(cache, attend, length, values) for cache in caches] for values in limits]
            return [sum(_time_cases(group, rounds)) for group in groups]

        best = replace(best, matrix_queries=MATRIX_QUERIES[0] - _FEWEST_ROWS)
        best = yield from _raise_limit("matrix_queries", MATRIX_QUERIES, best, vectors_or_matrices)

    def packed_or_decoded(count: int, best: KernelThresholds) -> list[float]:
        cases = [[Case(cache, run, count, best) for cache in caches] for run in (attend, prefill)]
        return [sum(_time_cases(group, rounds)) for group in cases]

    best = replace(best, packed_queries=PACKED_QUERIES[0])
    yield from _raise_limit("packed_queries", PACKED_QUERIES, best, packed_or_decoded)


def _raise_limit(
    name: str, values: tuple[int, ...], best: KernelThresholds, seconds: Callable[[int, KernelThresholds], list[float]]
) -> Generator[Step, None, KernelThresholds]:
    for value in values:
        below, above = seconds(value, best)
        if below < above:
            best = replace(best, **{name: value})
        yield name, value, above / below, best
        if below >= above:
            break
    return best


def _make_cache(tokens: int) -> Regions:
    layout = RowLayout(*(get_format("tq4").codec(_DIM, CodecOptions(seed=seed), mx.float16) for seed in (0, 1)))
    rows = encode(_random(_HEADS, tokens), _random(_HEADS, tokens), layout).rows
    keys, values = _random(_HEADS, _FULL_TOKENS), _random(_HEADS, _FULL_TOKENS)
    mx.eval(rows, keys, values)
    return Regions(rows, tokens, layout, keys, values, _FULL_TOKENS // 2, _FULL_TOKENS)


def _random(heads: int, tokens: int) -> mx.array:
    return mx.random.normal((1, heads, tokens, _DIM)).astype(mx.float16)


def _time_cases(cases: list[Case], rounds: int) -> list[float]:
    """Return the median seconds of each case, with cases timed in turn."""
    for case in cases:
        _time(case, 1)  # compiles and warms up
    repeats = [max(1, int(_SECONDS / _time(case, 1))) for case in cases]
    seconds = [[_time(case, count) for case, count in zip(cases, repeats, strict=True)] for _ in range(rounds)]
    return [statistics.median(times) for times in zip(*seconds, strict=True)]


def _time(case: Case, repeats: int) -> float:
    """Return the seconds of a call in a chain, where the queries are the output of the call before."""
    queries = _random(_HEADS * _GROUP, case.queries)
    mx.eval(queries)
    with thresholds.using(case.limits):
        started = time.perf_counter()
        for _ in range(repeats):
            queries = case.run(queries, case.regions, scale=_DIM**-0.5, mask="causal")
        mx.eval(queries)
        return (time.perf_counter() - started) / repeats
