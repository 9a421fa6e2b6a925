"""Measures the thresholds of `kernels.thresholds` on this machine.

One value after the other, the others kept: each candidate's attention is timed in turn, several rounds, and the least
median wins. `packed_queries` and `short`, up to which one way serves, are raised while it is faster than the other.
Without a GPU only `packed_queries` matters, and only it is measured.
"""

import statistics
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace

import mlx.core as mx

from mlx_tq.codec.formats import CodecOptions, get_format
from mlx_tq.codec.rows import RowLayout
from mlx_tq.kernels import backend, thresholds
from mlx_tq.kernels.attend import attend
from mlx_tq.kernels.encode import encode
from mlx_tq.kernels.prefill import prefill
from mlx_tq.kernels.regions import Regions
from mlx_tq.kernels.thresholds import KernelThresholds

SHORT = (320, 384, 512, 768, 1024, 1536, 2048, 4096)  # tokens
QUERIES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
CANDIDATES = {
    "simdgroups": (128, 256, 512, 1024, 2048, 4096, 8192),
    "least_block": (32, 64, 128, 256),
    "merging": (1, 2, 4, 8),
}
_HEADS, _GROUP, _DIM = 8, 4, 128
_FULL = 256  # tokens in the model's type
_TARGET = 0.05  # seconds of chained calls in one measurement


_Step = tuple[str, int, float, KernelThresholds]


def tune(tokens: list[int], rounds: int) -> Iterator[_Step]:
    """Measure at contexts of so many packed tokens, and `short` at its own, tq4 in fp16.

    Yields:
        A threshold's name, a value of it, its seconds summed over the contexts (of `packed_queries` and `short`: by how
        many times attending to packed rows, or one kernel, is faster than the other way), and the best thresholds until
        then.
    """
    best = thresholds.current()
    problems = [_Problem(count) for count in tokens]
    if backend.current() != "reference":
        best = replace(best, short=0)
        for name, values in CANDIDATES.items():
            candidates = [replace(best, **{name: value}) for value in values]
            seconds = _seconds([(problem, attend, 1, cut) for cut in candidates for problem in problems], rounds)
            totals = [sum(seconds[i : i + len(tokens)]) for i in range(0, len(seconds), len(tokens))]
            best = candidates[totals.index(min(totals))]
            for value, total in zip(values, totals, strict=True):
                yield name, value, total, best

        def in_one_and_in_two(count: int, best: KernelThresholds) -> list[float]:
            problem = _Problem(count - _FULL)
            return _seconds([(problem, attend, 1, replace(best, short=short)) for short in (count, 0)], rounds)

        best = yield from _raised("short", SHORT, best, in_one_and_in_two)

    def packed_and_decoded(count: int, best: KernelThresholds) -> list[float]:
        return [
            sum(_seconds([(problem, run, count, best) for problem in problems], rounds)) for run in (attend, prefill)
        ]

    yield from _raised("packed_queries", QUERIES, replace(best, packed_queries=QUERIES[0]), packed_and_decoded)


def _raised(
    name: str, values: tuple[int, ...], best: KernelThresholds, seconds: Callable[[int, KernelThresholds], list[float]]
) -> Generator[_Step, None, KernelThresholds]:
    """Raise a threshold while what serves up to it takes less time than what serves above."""
    for value in values:
        below, above = seconds(value, best)
        if below < above:
            best = replace(best, **{name: value})
        yield name, value, above / below, best
        if below >= above:
            break
    return best


class _Problem:
    """A cache of one layer, and how it is attended to."""

    def __init__(self, tokens: int) -> None:
        codecs = (get_format("tq4").codec(_DIM, CodecOptions(seed=seed), mx.float16) for seed in (0, 1))
        layout = RowLayout(*codecs)
        rows = encode(self._random(_HEADS, tokens), self._random(_HEADS, tokens), layout).rows
        full = self._random(_HEADS, _FULL), self._random(_HEADS, _FULL)
        mx.eval(rows, full)
        self.regions = Regions(rows, tokens, layout, *full, _FULL // 2, _FULL)

    def call(self, run: Callable[..., mx.array], queries: mx.array) -> mx.array:
        return run(queries, self.regions, scale=_DIM**-0.5, mask="causal")

    def queries(self, count: int) -> mx.array:
        return self._random(_HEADS * _GROUP, count)

    @staticmethod
    def _random(heads: int, tokens: int) -> mx.array:
        return mx.random.normal((1, heads, tokens, _DIM)).astype(mx.float16)


_Case = tuple[_Problem, Callable[..., mx.array], int, KernelThresholds]


def _seconds(cases: list[_Case], rounds: int) -> list[float]:
    """The median time of each case's call, cases in turn."""
    for case in cases:
        _time(case, 1)  # compiles, and warms
    repeats = [max(1, int(_TARGET / _time(case, 1))) for case in cases]
    found = [[_time(case, count) for case, count in zip(cases, repeats, strict=True)] for _ in range(rounds)]
    return [statistics.median(times) for times in zip(*found, strict=True)]


def _time(case: _Case, repeats: int) -> float:
    """Seconds of one of chained calls: each takes the last one's output for its queries."""
    problem, run, count, cut = case
    queries = problem.queries(count)
    mx.eval(queries)
    with thresholds.using(cut):
        started = time.perf_counter()
        for _ in range(repeats):
            queries = problem.call(run, queries)
        mx.eval(queries)
        return (time.perf_counter() - started) / repeats
