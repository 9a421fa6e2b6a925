"""Caches of a batch that begin with the same packed rows attend to these together, each as exactly as alone."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from kernels.cases import Problem, check_attention, make_problem, random
from mlx_tq.kernels import backend
from mlx_tq.kernels.attend import attend_batch
from mlx_tq.kernels.regions import Regions, SharedRows
from mlx_tq.kernels.shared_prefixes import find_shared_prefixes

CASE = {"batch": 1, "groups": 3, "sinks": True, "packed": 160}
CASES = [
    {"length": 1},
    {"length": 3, "mask": "causal", "key": "tq4", "value": "tcq3", "normalized": "gaps"},
    {"length": 2, "mask": "causal", "dtype": "float32", "normalized": "blocks", "dims": (80, 112)},
    {"length": 8, "mask": "causal", "groups": 7, "normalized": "blocks"},
    {"length": 1, "packed": 1600, "dtype": "float32"},
]
# The packed tokens of each cache, and those in buffers that others may share: A or C, then B. Caches that share most
# are not neighbors; some have all their rows in such buffers, or all that a buffer has.
CACHES = (
    (160, "A64 B32"), (97, "A64 B32"), (160, ""), (130, "A48"), (70, "C40"),
    (96, "A64 B32"), (60, "A60"), (0, ""), (44, "C44"),
)  # fmt: skip
PREFIXES = [((0, 1, 5), 96), ((3, 6), 48), ((4, 8), 40)]


def shared_batch(problem: Problem) -> list[Regions]:
    """Return `CACHES`, whose rows are the first ones of a problem's, times a factor."""
    whole, buffers = problem.regions(), {}
    batch, factor = [], problem.arguments["packed_tokens"] // 160
    for packed, text in CACHES:
        parts, start = [], 0
        for word in text.split():
            name, count = word[0], factor * int(word[1:])
            if name not in buffers:
                buffers[name] = mx.contiguous(whole.packed_rows[:, :, start : start + 64 * factor])
            parts.append((buffers[name], count))
            start += count
        rows, packed = None, factor * packed
        if packed > start:
            rows = mx.contiguous(whole.packed_rows[:, :, start:])
        elif parts:  # the last one may be written to, so it is no shared one yet
            rows, _ = parts.pop()
        shared = tuple(SharedRows(*part) for part in parts)
        batch.append(replace(whole, packed_rows=rows, packed_tokens=packed, shared=shared))
    return batch


def solve(problem: Problem, batch: list[Regions]) -> tuple[mx.array, mx.array]:
    """Return queries for each cache, and what they attend to."""
    queries = random((len(batch), *problem.arguments["queries"].shape[1:]), "float16", seed=4)
    queries = queries.astype(problem.arguments["queries"].dtype)
    options = {name: problem.arguments[name] for name in ("scale", "mask", "sinks")}
    return queries, attend_batch(queries, batch, **options)


def cut(problem: Problem, packed: int, queries: mx.array) -> Problem:
    """Return the problem of a cache with the first `packed` tokens alone."""
    sinks = problem.arguments["sink_tokens"]
    stop = sinks + problem.arguments["packed_tokens"]

    def select(array, concatenate):
        return concatenate([array[:, :, : sinks + packed], array[:, :, stop:]], axis=2)

    decoded = tuple(select(array, np.concatenate) for array in problem.decoded)
    plain = tuple(select(array, mx.concatenate) for array in problem.plain)
    return problem._replace(decoded=decoded, plain=plain).replace(packed_tokens=packed, queries=queries)


def check(problem: Problem, queries: mx.array, result: mx.array, peak: float = 2.5) -> None:
    factor = problem.arguments["packed_tokens"] // 160
    for i, (packed, _) in enumerate(CACHES):
        check_attention(cut(problem, factor * packed, queries[i : i + 1]), result[i : i + 1], peak=peak)


def test_caches_are_grouped_by_what_saves_most():
    batch = shared_batch(make_problem(**CASE))
    assert find_shared_prefixes(batch) == PREFIXES
    assert find_shared_prefixes(batch[:1]) == find_shared_prefixes([]) == []


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_each_cache_is_as_exact_as_alone(name, case):
    problem = make_problem(**CASE | case)
    batch = shared_batch(problem)
    with backend.using(name):
        check(problem, *solve(problem, batch))


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_the_rows_of_a_prefix_are_read_once(name):
    """The normalization of all but the first of its caches is not read."""
    problem = make_problem(**CASE, length=1, normalized="blocks")
    whole = problem.regions()
    rows = replace(whole, packed_tokens=96)
    broken = replace(rows, normalization=replace(rows.normalization, means=rows.normalization.means * mx.nan))
    with backend.using(name):
        queries, result = solve(problem, [rows, broken, rows])
    for i in range(3):
        check_attention(cut(problem, 96, queries[i : i + 1]), result[i : i + 1], peak=2.5)
