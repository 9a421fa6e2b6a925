"""Time the attention of one layer over several kinds of caches, in one run.

Each call's queries are the output of the call before, and the calls take turns among several caches, so that neither
overlapping calls nor the chip's own cache make it look faster than in a model.
"""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_tq.bench.layer_caches import Cell, LayerArm, Problem, cache_nbytes, make_problem
from mlx_tq.bench.timing import compare_arms
from mlx_tq.errors import KernelUnavailableError

CACHES, MOST_CACHES = 8, 64  # at least and at most, that calls take turns among
COLD_NBYTES = 192 << 20  # of all caches of an arm together, more than any chip's cache holds
LEAST_CALLS, MAX_CALLS = 2, 256  # of a chain; with few, caches are cold too: chains of other arms came between


class Timing(NamedTuple):
    arm: str
    dtype: str
    tokens: int
    batch: int
    length: int
    nbytes: int  # of one cache
    caches: int  # that calls took turns among
    median: float  # seconds of a call; low and high are the extremes of the rounds
    low: float
    high: float
    build: float  # seconds to build a call in Python
    ratios: list[float]  # times as fast as the first arm, for each round
    gb_per_s: float
    difference: float | None  # from the reference implementation, relative to the largest value


UNSTEADY = " (unsteady: this machine's speed changed meanwhile)"


class CellTimings(NamedTuple):
    timings: list[Timing]
    skipped_arms: dict[str, str]  # reason by arm
    discarded: int
    steady: bool

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return self._asdict() | {"timings": [timing._asdict() for timing in self.timings]}


def measure_cell(cell: Cell, arms: list[LayerArm], *, rounds: int, seconds: float, memory: int) -> CellTimings:
    """Time the arms, the first of which is the anchor, in chains of about `seconds`; caches take at most `memory`."""
    mx.random.seed(0)
    counts = count_caches(cell, arms, memory)
    skipped = {arm.name: "does not fit in memory" for arm in arms if arm.name not in counts}
    problems: dict[str, Problem] = {}
    for arm in arms:
        if arm.name in counts:
            try:
                problems[arm.name] = make_problem(cell, arm, counts[arm.name])
                problems[arm.name].time(1)  # compiles
            except (RuntimeError, ValueError, KernelUnavailableError) as error:
                problems.pop(arm.name, None)  # mlx has no kernel for some shapes
                skipped[arm.name] = str(error)[:400]
    if not problems:
        return CellTimings([], skipped, 0, steady=True)
    timed: dict[str, Callable[[], float]] = {}
    build: dict[str, float] = {}
    for name, problem in problems.items():
        times = problem.time(LEAST_CALLS)
        calls = max(LEAST_CALLS, min(MAX_CALLS, int(seconds / max(times.run, 1e-9))))
        timed[name], build[name] = partial(_run_seconds, problem, calls), times.build
    compared = compare_arms(timed, rounds)
    timings = []
    for arm in arms:
        if arm.name in problems:
            problem, measured = problems[arm.name], compared.arms[arm.name]
            median = statistics.median(measured.seconds)
            spread = median, min(measured.seconds), max(measured.seconds), build[arm.name], measured.ratios
            sizes = cell.tokens, cell.batch, cell.length, problem.nbytes, counts[arm.name]
            rate = problem.nbytes / median / 1e9
            timings.append(Timing(arm.name, arm.dtype, *sizes, *spread, rate, problem.difference))
    return CellTimings(timings, skipped, compared.discarded, compared.steady)


def _run_seconds(problem: Problem, calls: int) -> float:
    return problem.time(calls).run


def count_caches(cell: Cell, arms: list[LayerArm], memory: int) -> dict[str, int]:
    """Return how many caches each arm gets; where too few bytes are left, fewer than CACHES, and the largest none."""
    sizes = {arm.name: cache_nbytes(cell, arm) for arm in arms}
    targets = {name: max(CACHES, min(MOST_CACHES, -(-COLD_NBYTES // size))) for name, size in sizes.items()}
    while sizes:
        for most in (MOST_CACHES, *range(CACHES, 0, -1)):
            counts = {name: min(most, targets[name]) for name in sizes}
            if sum(counts[name] * size for name, size in sizes.items()) <= memory:
                return counts
        del sizes[max(sizes, key=lambda name: sizes[name])]
    return {}
