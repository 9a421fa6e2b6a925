"""Measure the thresholds of `kernels.thresholds` on this machine: for several shapes of heads, one at a time.

`packed_queries`, `short_tokens` and `matrix_queries` are limits between two ways to attend: they are raised while the
way below the limit is faster. The reference backend uses `packed_queries` only. A built-in threshold is kept unless
another is more than 2 % faster.
"""

import statistics
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from mlx_tq.bench.layer_caches import Cell, LayerArm, LayerShape, Problem, make_problem
from mlx_tq.bench.timing import compare_arms
from mlx_tq.config import KVConfig
from mlx_tq.kernels import backend, thresholds
from mlx_tq.kernels.thresholds import HeadShape, KernelThresholds

# Of Qwen3-8B, Qwen3.8-27B, Qwen3.5-9B and gpt-oss.
SHAPES = (LayerShape(32, 8, 128), LayerShape(24, 4, 256), LayerShape(16, 2, 256), LayerShape(64, 8, 64))
SHORT_TOKENS = (320, 384, 512, 768, 1024, 1536, 2048, 4096)
MATRIX_QUERIES = (24, 32, 40, 64, 128)  # query rows of a KV head; each is measured with 8 fewer
PACKED_QUERIES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
CANDIDATES = {
    "simdgroups": (128, 256, 512, 1024, 2048, 4096, 8192),
    "min_block": (32, 64, 128, 256),
    "merge_simdgroups": (1, 2, 4, 8),
    "level_tables": (0, 1, 2),
}
GAIN = 1.02  # times as fast as the built-in threshold, to leave it
CACHES, MOST_CALLS = 8, 256  # that a chain of calls takes turns among, and of a chain
CHAIN_SECONDS = 0.05
_FEWEST_ROWS = 8  # of a product of matrices


class Arm(NamedTuple):
    """Calls to time: `length` queries with some thresholds, or on rows that are decoded for mlx's own attention."""

    limits: KernelThresholds
    length: int = 1
    decodes: bool = False


class Step(NamedTuple):
    """A measurement: how many times as fast as the built-in threshold, for limits as the way above, a value is."""

    shape: HeadShape
    name: str
    value: int
    speed: float
    best: KernelThresholds  # so far


def tune(tokens: list[int], rounds: int) -> Iterator[Step]:
    """Measure each threshold of each shape at contexts of `tokens` (`short_tokens` at its own), tq4 in fp16.

    On a CPU, where each call takes long, the first shape stands for all.
    """
    for shape in SHAPES if backend.is_gpu() else SHAPES[:1]:
        yield from _tune_shape(shape, tokens, rounds)


def _tune_shape(shape: LayerShape, tokens: list[int], rounds: int) -> Iterator[Step]:
    heads = HeadShape(shape.head_dim, shape.query_heads // shape.kv_heads)
    step = partial(Step, heads)
    best = thresholds.table().built_in
    if backend.is_gpu():
        for name, values in CANDIDATES.items():
            candidates = sorted(values, key=lambda value: value != getattr(best, name))  # the built-in one is first
            arms = [Arm(replace(best, **{name: value, "short_tokens": 0})) for value in candidates]
            speeds = compare(shape, tokens, arms, rounds)
            if max(speeds) > GAIN:
                best = replace(best, **{name: candidates[speeds.index(max(speeds))]})
            yield from (step(name, value, speed, best) for value, speed in zip(candidates, speeds, strict=True))

        def one_or_two_kernels(count: int, best: KernelThresholds) -> float:
            arms = [Arm(replace(best, short_tokens=most)) for most in (0, count)]
            return compare(shape, [count], arms, rounds)[1]

        best = yield from _raise_limit(step, "short_tokens", 0, SHORT_TOKENS, best, one_or_two_kernels)
    if backend.current() == "metal":

        def vectors_or_matrices(count: int, best: KernelThresholds) -> float:
            length = (count - _FEWEST_ROWS) // heads.group
            limits = [replace(best, short_tokens=0, matrix_queries=least) for least in (_FEWEST_ROWS, count)]
            return compare(shape, tokens, [Arm(values, length) for values in limits], rounds)[1]

        lowest = MATRIX_QUERIES[0] - _FEWEST_ROWS
        best = yield from _raise_limit(step, "matrix_queries", lowest, MATRIX_QUERIES, best, vectors_or_matrices)

    def packed_or_decoded(count: int, best: KernelThresholds) -> float:
        return compare(shape, tokens, [Arm(best, count, decodes=True), Arm(best, count)], rounds)[1]

    yield from _raise_limit(step, "packed_queries", 0, PACKED_QUERIES, best, packed_or_decoded)


def _raise_limit(
    step: Callable[..., Step],
    name: str,
    lowest: int,
    values: tuple[int, ...],
    best: KernelThresholds,
    speed_below: Callable[[int, KernelThresholds], float],
) -> Generator[Step, None, KernelThresholds]:
    built_in: int = getattr(best, name)
    best = replace(best, **{name: lowest})
    for value in values:
        speed = speed_below(value, best)
        is_faster = speed > GAIN if value > built_in else speed * GAIN >= 1
        if is_faster:
            best = replace(best, **{name: value})
        yield step(name, value, speed, best)
        if not is_faster:
            break
    return best


def compare(shape: LayerShape, tokens: list[int], arms: list[Arm], rounds: int) -> list[float]:
    """Return how many times as fast as the first arm each is, over all contexts together."""
    config = KVConfig(key="tq4", value="tq4")
    problems: dict[tuple[int, bool], list[Problem]] = {}
    for arm in arms:
        if arm[1:] not in problems:
            cached = LayerArm("tq4", config=config, decodes=arm.decodes)
            cells = (Cell(shape, count, length=arm.length) for count in tokens)
            problems[arm[1:]] = [make_problem(cell, cached, CACHES) for cell in cells]
    timed = {str(number): _timer(arm, problems[arm[1:]]) for number, arm in enumerate(arms)}
    compared = compare_arms(timed, rounds).arms
    return [statistics.median(compared[name].ratios) for name in timed]


def _timer(arm: Arm, problems: list[Problem]) -> Callable[[], float]:
    """Return the function that times a call on each of the problems, after a first one, which compiles."""
    with thresholds.using(arm.limits):
        seconds = [problem.time(1).run for problem in problems for _ in range(2)][1::2]
    calls = [max(1, min(MOST_CALLS, int(CHAIN_SECONDS / max(one, 1e-9)))) for one in seconds]

    def run() -> float:
        with thresholds.using(arm.limits):
            return sum(problem.time(count).run for problem, count in zip(problems, calls, strict=True))

    return run
