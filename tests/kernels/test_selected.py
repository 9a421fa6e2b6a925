"""Attention to selected rows is as exact as mx.fast attention over exactly those rows."""

from random import Random

import mlx.core as mx
import numpy as np
import pytest

from kernels.cases import ALL_FORMATS, DTYPES, HEADS, Problem, check_attention, double, make_problem
from mlx_tq.errors import ConfigError
from mlx_tq.kernels import backend
from mlx_tq.kernels.regions import Selection
from mlx_tq.kernels.selected import attend_selected

PARAMETERS = {
    **ALL_FORMATS,
    "dims": ((64, 64), (80, 48), (128, 128)),
    "packed": (1, 33, 150, 700),
    "groups": (1, 3, 8),
    "length": (1, 2, 9),
    "dtype": DTYPES,
    "normalized": (None, "blocks", "gaps"),
    "sink_tokens": (0, 5),
    "recent": (0, 6),
}
ROUNDING = 2.0**-24  # of fp32, relative


def make_selection(packed: int, rng: np.random.Generator) -> Selection:
    index = rng.integers(0, packed, int(rng.integers(1, 2 * packed + 1))) if rng.random() < 0.6 else None
    count = packed if index is None else len(index)
    ranges = np.sort(rng.integers(0, count + 1, (HEADS, 2)), axis=1) if index is None or rng.random() < 0.6 else None
    if ranges is not None:
        ranges[:, 1] -= ranges[:, 0]
    return Selection(*(None if array is None else mx.array(array.astype(np.int32)) for array in (ranges, index)))


def select(problem: Problem, selection: Selection) -> Problem:
    """Return the problem of the rows of the index, in which a mask hides what is not in the ranges."""
    sinks, packed, length = (problem.arguments[name] for name in ("sink_tokens", "packed_tokens", "queries"))
    length = length.shape[2]
    index = np.arange(packed) if selection.index is None else np.array(selection.index)
    columns = np.concatenate([np.arange(sinks), sinks + index, np.arange(sinks + packed, problem.tokens)])
    visible = np.tile(np.tril(np.ones((length, len(columns)), bool), len(columns) - length), (1, HEADS, 1, 1))
    if selection.ranges is not None:
        for head, (first, count) in enumerate(np.array(selection.ranges)):
            visible[0, head, :, sinks : sinks + first] = False
            visible[0, head, :, sinks + first + count : sinks + len(index)] = False
    groups = problem.arguments["queries"].shape[1] // HEADS
    selected = problem.replace(mask=mx.array(np.repeat(visible, groups, axis=1)))
    plain = (mx.take(x, mx.array(columns), axis=2) for x in problem.plain)
    return selected._replace(decoded=tuple(x[:, :, columns] for x in problem.decoded), plain=tuple(plain))


def check(seed: int) -> None:
    choice, rng = Random(seed), np.random.default_rng(seed)
    case = {name: choice.choice(values) for name, values in PARAMETERS.items()}
    problem = make_problem(**case, batch=1, seed=seed)
    selection = make_selection(case["packed"], rng)
    queries, scale = problem.arguments["queries"], problem.arguments["scale"]
    selected = select(problem, selection)
    output, log_sums = attend_selected(queries, problem.regions(), selection, scale=scale)
    check_attention(selected, output, peak=3.0)
    keys, visible = np.repeat(selected.decoded[0], case["groups"], axis=1), np.array(selected.arguments["mask"])
    scores = double(queries) @ keys.swapaxes(-1, -2) * scale
    truth = np.logaddexp.reduce(np.where(visible, scores, -np.inf), axis=-1)
    norms = scale * np.linalg.norm(double(queries), axis=-1).max() * np.linalg.norm(keys, axis=-1).max()
    assert np.abs(double(log_sums) - truth).max() <= ROUNDING * (4 * norms + 2 * np.abs(truth).max())


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("count", [8, pytest.param(300, marks=pytest.mark.full)])
def test_random_selections(count, name):
    with backend.using(name):
        for seed in range(count):
            check(seed)


@pytest.mark.parametrize("selection", [{"index": [0, 97]}, {"index": [-1]}, {"ranges": [[0, 97], [1, 97]]}])
def test_rows_that_do_not_exist_are_refused(selection):
    problem = make_problem(batch=1, packed=97)
    selection = Selection(**{name: mx.array(rows, mx.int32) for name, rows in selection.items()})
    with pytest.raises(ConfigError, match=r"row (97|-1|98); valid are 0 to 9[67]\."):
        attend_selected(problem.arguments["queries"], problem.regions(), selection, scale=1.0)


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_ranges_of_a_cache_without_packed_rows(name):
    problem = make_problem(batch=1, packed=0, mask="causal")
    nothing = Selection(ranges=mx.zeros((HEADS, 2), mx.int32))
    queries, scale = problem.arguments["queries"], problem.arguments["scale"]
    with backend.using(name):
        output, _ = attend_selected(queries, problem.regions(), nothing, scale=scale)
    check_attention(problem, output)
