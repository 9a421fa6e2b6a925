"""Time calls so that the figures hold in a decode step.

mlx runs independent calls of one evaluation at the same time, and an evaluation by itself takes up to 0.3 ms. So calls
are chained: the output of one is the input of the next. Arms take turns in alternating order, and the first arm, the
anchor, is measured again after every few of them: where it drifts, the clock of the chip has changed, and what was
measured since is discarded and measured again.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx

from mlx_tq.kernels.gpu import gpu_backend

BETWEEN_ANCHORS = 3  # arms
DRIFT = 0.1  # of the anchor, beyond which measurements are discarded
ATTEMPTS = 3  # at measuring the same arms; then the figures count, and are not steady

Step = Callable[[mx.array], mx.array]


class ChainTimes(NamedTuple):
    """Seconds of a call: to build it in Python, which overlaps with the step before in a model, and to run it.

    Kernels of a CPU run while the call is built; there, all of the time counts as running.
    """

    build: float
    run: float


def run_chain(steps: Sequence[Step], first: mx.array, calls: int) -> ChainTimes:
    """Build a chain of `calls`, in which the steps take turns, then run it."""
    started = time.perf_counter()
    for number in range(calls):
        first = steps[number % len(steps)](first)
    built = time.perf_counter() if gpu_backend() else started
    mx.eval(first)
    return ChainTimes((built - started) / calls, (time.perf_counter() - built) / calls)


class ArmTimes(NamedTuple):
    seconds: list[float]  # of a call, for each round
    ratios: list[float]  # times as fast as the anchor right before and after it, for each round


class Comparison(NamedTuple):
    arms: dict[str, ArmTimes]
    discarded: int  # measurements that were repeated because the anchor drifted
    steady: bool  # whether the anchor was within DRIFT next to all figures


def compare_arms(arms: dict[str, Callable[[], float]], rounds: int) -> Comparison:
    """Measure every arm in each round, in alternating order: each returns the seconds of a call.

    The first arm is the anchor.
    """
    anchor, *others = arms
    times = {name: ArmTimes([], []) for name in arms}
    discarded, steady = 0, True
    for number in range(rounds):
        order = others[:: -1 if number % 2 else 1]
        before = arms[anchor]()
        anchor_seconds = [before]
        for start in range(0, len(order), BETWEEN_ANCHORS):
            group = order[start : start + BETWEEN_ANCHORS]
            for attempt in range(ATTEMPTS):
                seconds = [arms[name]() for name in group]
                after = arms[anchor]()
                is_steady = abs(after / before - 1) <= DRIFT
                near, before = (before + after) / 2, after
                if is_steady or attempt == ATTEMPTS - 1:
                    break
                discarded += len(group)
            steady &= is_steady
            anchor_seconds.append(after)
            for name, value in zip(group, seconds, strict=True):
                times[name].seconds.append(value)
                times[name].ratios.append(near / value)
        times[anchor].seconds.append(statistics.median(anchor_seconds))
        times[anchor].ratios.append(1.0)
    return Comparison(times, discarded, steady)


class MachineSpeed(NamedTuple):
    launch_seconds: float  # of an evaluation of one small operation: the floor under a call that is evaluated alone
    chained_seconds: float  # of a small operation in a chain: the floor under a call in a decode step
    copy_gb_per_s: float  # of bytes read and written by a plain copy


def measure_speed() -> MachineSpeed:
    """Measure what any call costs on this machine, and the memory's rate."""
    small = mx.zeros(1024)
    large = mx.zeros((1 << 28 if gpu_backend() else 1 << 24) // 4, mx.uint32)
    mx.eval(small, large)
    measured = []
    for array, calls, times in ((small, 1, 50), (small, 200, 5), (large, 10, 5)):
        run_chain([_add_one], array, calls)
        measured.append(statistics.median(run_chain([_add_one], array, calls).run for _ in range(times)))
    launch, chained, copy = measured
    return MachineSpeed(launch, chained, 2 * large.nbytes / copy / 1e9)


def _add_one(x: mx.array) -> mx.array:
    return x + 1
