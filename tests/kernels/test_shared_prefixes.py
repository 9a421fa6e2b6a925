"""Caches of a batch that begin with the same packed rows attend to these together, each as exactly as alone."""

from dataclasses import replace

import mlx.core as mx
import pytest

from kernels.cases import check_attention, make_problem
from kernels.shared_caches import PREFIXES, check, cut, shared_batch, solve
from mlx_tq.kernels import backend
from mlx_tq.kernels.shared_prefixes import find_shared_prefixes

CASE = {"batch": 1, "groups": 3, "sinks": True, "packed": 160}
CASES = [
    {"length": 1},
    {"length": 3, "mask": "causal", "key": "tq4", "value": "tcq3", "normalized": "gaps"},
    {"length": 2, "mask": "causal", "dtype": "float32", "normalized": "blocks", "dims": (80, 112)},
    {"length": 8, "mask": "causal", "groups": 7, "normalized": "blocks"},
    {"length": 1, "packed": 1600, "dtype": "float32"},
]


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
