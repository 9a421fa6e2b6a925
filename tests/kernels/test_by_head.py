"""Attention to a layer whose heads keep different tokens is as exact as mx.fast attention over those of each head."""

from collections.abc import Sequence
from random import Random

import mlx.core as mx
import numpy as np
import pytest

from kernels.cases import ALL_FORMATS, DTYPES, HEADS, Problem, add_spare, check_attention, make_problem
from mlx_tq.kernels import backend
from mlx_tq.kernels.by_head import attend_batch_by_head, attend_by_group, attend_by_head
from mlx_tq.kernels.regions import HeadRows, Regions, SharedRows

PARAMETERS = {
    **ALL_FORMATS,
    "dims": ((64, 64), (80, 48), (128, 128)),
    "packed": (1, 33, 150, 700),
    "groups": (1, 3, 8),
    "length": (1, 2, 9, 70),
    "dtype": DTYPES,
    "normalized": (None, "blocks", "gaps"),
    "sink_tokens": (0, 5),
    "recent": (0, 6, 40),
    "sinks": (False, True),
}
PEAK = 3.0


@pytest.fixture(autouse=True, params=["reference", "cpu"])
def _backend(request):
    with backend.using(request.param):
        yield


def random_problem(seed: int) -> tuple[Problem, Regions]:
    """A cache whose heads have the first packed rows, each as many as it has, and attention over exactly those."""
    choice, rng = Random(seed), np.random.default_rng(seed)
    case = {name: choice.choice(values) for name, values in PARAMETERS.items()}
    problem = make_problem(**case, batch=1, mask="causal", seed=seed)
    together = [(0, 1)] if choice.random() < 0.3 else [(0,), (1,)]  # heads that keep the same rows
    counts = [int(rng.integers(0, case["packed"] + 1)) for _ in together]
    shares = [choice.choice((0, count // 3)) for count in counts]
    return divide(problem, choice.sample(together, len(together)), counts, shares)


def divide(
    problem: Problem, together: Sequence[tuple[int, ...]], counts: Sequence[int], shares: Sequence[int] | None = None
) -> tuple[Problem, Regions]:
    """Keep the first rows, so many, of each group of heads, the first of them in a buffer that caches share."""
    packed, length, sinks = (
        problem.regions().packed_tokens,
        problem.arguments["queries"].shape[2],
        problem.regions().sink_tokens,
    )
    visible = np.tile(np.tril(np.ones((length, problem.tokens), bool), problem.tokens - length), (1, HEADS, 1, 1))
    groups = []
    for heads, count, before in zip(together, counts, shares or [0] * len(counts), strict=True):
        rows = problem.rows[:, heads[0] : heads[-1] + 1, :count]
        shared = (SharedRows(rows[:, :, :before], before),) if before else ()
        own = add_spare(rows[:, :, before:]) if count > before else None
        index = None if problem.normalization is None else problem.normalization.index
        groups.append(HeadRows(heads, own, count, shared, index))
        visible[0, list(heads), :, sinks + count : sinks + packed] = False
    repeats = problem.arguments["queries"].shape[1] // HEADS
    masked = problem.replace(mask=mx.array(np.repeat(visible, repeats, axis=1)))
    return masked, problem.regions(packed_rows=None, packed_tokens=max(counts), groups=tuple(groups))


def options(problem: Problem) -> dict:
    return {"scale": problem.arguments["scale"], "mask": "causal", "sinks": problem.arguments["sinks"]}


def check(seed: int) -> None:
    problem, regions = random_problem(seed)
    queries = problem.arguments["queries"]
    run = attend_by_head if queries.shape[2] <= 8 else attend_by_group
    check_attention(problem, run(queries, regions, **options(problem)), peak=PEAK)


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(8, 40))])
def test_random_rows_of_each_head(seed):
    check(seed)


@pytest.mark.full
@pytest.mark.parametrize("part", range(10))
def test_more_random_rows_of_each_head(part):
    for seed in range(30):
        check(1000 + 30 * part + seed)


@pytest.mark.parametrize("key", ["q8", "tq4"])
def test_a_batch_of_caches(key):
    problems, regions = [], []
    for seed, packed in enumerate((97, 1, 300)):
        problem = make_problem(key=key, batch=1, packed=packed, length=2, mask="causal", seed=seed)
        problem = problem.replace(layout=(problems or [problem])[0].layout)
        parts = [HeadRows((head,), problem.rows[:, head : head + 1], packed) for head in range(HEADS)]
        regions.append(problem.regions(packed_rows=None, groups=tuple(parts)) if seed else problem.regions())
        problems.append(problem)
    queries = mx.concatenate([problem.arguments["queries"] for problem in problems])
    out = attend_batch_by_head(queries, regions, **options(problems[0]))
    for i, problem in enumerate(problems):
        check_attention(problem, out[i : i + 1], peak=PEAK)
