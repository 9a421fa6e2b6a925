"""Kernels for a CPU give the codes of the codec bit for bit, and scores as exact as those of mlx operations."""

import os
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from kernels.cases import (
    ALL_FORMATS,
    DIMS,
    DTYPES,
    HEADS,
    SORTED,
    Problem,
    attend_exactly,
    decode_exactly,
    double,
    has_same_bits,
    make_problem,
    random,
    unrotate,
)
from kernels.covering import case_id, covering
from mlx_tq.kernels import backend
from mlx_tq.kernels.attend import attend
from mlx_tq.kernels.encode import encode
from mlx_tq.kernels.mlx_attention import attention
from mlx_tq.kernels.prefill import prefill
from mlx_tq.kernels.recall_score import group_queries, log_sum_exp, recall_score
from mlx_tq.kernels.score import score

PARAMETERS = {
    "dim": DIMS,
    **ALL_FORMATS,
    "dtype": DTYPES,
    "normalized": (None, "blocks", "gaps"),
    "rule": ("raw", "matched", "ls", "unbiased"),
    "wide": (False, True),
    "packed": (1, 31, 64, 65, 150),
}
SORTED_DIMS = (64, 96, 128, 192, 256)
SORTED_KEYS = {**PARAMETERS, "key": SORTED, "dim": SORTED_DIMS}
CASES = [  # with every value, and with every pair of values
    pytest.param(number, case, id=f"{case_id(case)}-{ways}", marks=[pytest.mark.full] * (ways - 1))
    for ways in (1, 2)
    for number, case in enumerate(covering(PARAMETERS, ways) + covering(SORTED_KEYS, ways))
]
numbered = pytest.mark.parametrize(("number", "case"), CASES)
ROUNDING = 2.0**-24  # of fp32, relative


@pytest.fixture(autouse=True)
def _cpu():
    with backend.using("cpu"):
        yield


def problem_of(case: dict, seed: int) -> Problem:
    case = dict(case)
    dim = case.pop("dim")
    return make_problem((dim, DIMS[DIMS.index(dim) - 1]), **case, groups=3, length=2, seed=seed)


def reference(operation, *arguments, **options):
    with backend.using("reference"):
        return operation(*arguments, **options)


@numbered
def test_codes_are_those_of_the_codec(number, case):
    problem = problem_of(case, number)
    vectors = []
    for x, scale in zip(problem.packed, (3.0, 0.2), strict=True):  # zeros, tiny and huge values; strides put S before H
        y = x.astype(mx.float32) * mx.array([scale, 1e-3])[:, None, None]
        y[:, 0, -1], y[:, 1, -1, 1:] = 0, 0
        y[:, 1, ::7] = y[:, 1, ::7] * 2e4
        vectors.append(mx.contiguous(y.astype(x.dtype).swapaxes(1, 2)).swapaxes(1, 2))
    arguments = *vectors, problem.layout, problem.normalization
    result, expected = encode(*arguments), reference(encode, *arguments)
    assert has_same_bits(result.rows, expected.rows)
    assert result.health.tolist() == expected.health.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key", ["fp16", "q8", "tq4", "tcq2", "stcq3"])
def test_values_that_are_clamped_or_not_finite_are_counted(key, dtype):
    problem = make_problem((64, 80), key=key, value="tq3", dtype=dtype, packed=8)
    keys, values = problem.packed
    for i, value in enumerate((65504.0, 65536.0, 1e30, float("inf"), float("-inf"), float("nan"))):
        keys[:, 0, i, 3] = value
        values[:, 1, i, 70] = value
    keys[:, 1, 5, 0], keys[:, 1, 5, 1] = float("nan"), float("inf")
    result, expected = encode(keys, values, problem.layout), reference(encode, keys, values, problem.layout)
    assert result.health.tolist() == expected.health.tolist()
    finite = (mx.isfinite(keys).all(axis=-1) & mx.isfinite(values).all(axis=-1))[..., None]
    assert mx.array_equal(mx.where(finite, result.rows, 0), mx.where(finite, expected.rows, 0))


@numbered
def test_scores_of_eviction(number, case):
    problem = problem_of(case, number)
    rows, layout, tokens = problem.rows, problem.layout, case["packed"]
    dim, rotated = layout.key.head_dim, (1, 2, 0)[number % 3]
    pairs = np.random.default_rng(3).permutation(dim)[: dim // rotated if rotated else 0].reshape(2, -1)
    queries = random((HEADS, 3, dim), "float32", seed=2)
    weights = mx.abs(random((HEADS, 3, pairs.shape[1]), "float32", seed=4))
    arguments = rows, tokens, layout, queries, weights, mx.array(pairs, mx.int32), problem.normalization
    decoded = decode_exactly(layout.key, layout.keys(rows[:, :, :tokens]), problem.normalization)
    keys = unrotate(layout.key, decoded, problem.normalization)
    norms = np.sqrt(sum(keys[..., index] ** 2 for index in pairs))
    truth = double(queries) @ keys.swapaxes(-1, -2) + double(weights) @ norms.swapaxes(-1, -2)
    error, allowed = (np.abs(double(x) - truth).max() for x in (score(*arguments), reference(score, *arguments)))
    assert error <= max(2 * allowed, 8 * ROUNDING * np.abs(truth).max())


@numbered
def test_scores_of_recall(number, case):
    problem = problem_of(case, number)
    layout, tokens, normalization = problem.layout, case["packed"], problem.normalization
    layout = layout.select_heads(lambda array: array[:1])
    queries = problem.arguments["queries"].astype(mx.float32) * problem.arguments["scale"]
    keys = layout.split_keys(layout.split(problem.rows)[0][:1, :, :tokens])
    if normalization is not None:
        normalization = replace(normalization, scale=normalization.scale[:1], means=normalization.means[:1])
    sizes = [tokens] if number % 2 else [*[7] * (tokens // 7), *([tokens % 7] if tokens % 7 else [])]
    grouped = group_queries(queries[:1], HEADS, layout, normalization)
    stored = unrotate(layout.key, decode_exactly(layout.key, keys, normalization), normalization)
    truth = (double(queries[:1]).reshape(1, HEADS, -1, layout.key.head_dim) @ stored.swapaxes(-1, -2))[0]
    maxima = np.maximum.reduceat(truth, np.cumsum([0, *sizes[:-1]]), axis=-1)
    total = np.logaddexp.reduce(truth, axis=-1)
    norms = np.linalg.norm(double(queries), axis=-1).max() * np.linalg.norm(stored, axis=-1).max()
    result = recall_score(grouped, keys, layout, normalization, sizes)
    for array, exact, own in zip(result, (maxima, total), (0, np.abs(total).max()), strict=True):
        assert array.shape == exact.shape
        assert np.abs(double(array) - exact).max() <= ROUNDING * (4 * norms + own)


@pytest.mark.parametrize("case", covering({**PARAMETERS, "length": (1, 9)}, 1), ids=case_id)
def test_log_sum_exp_of_a_cache(case):
    dim, case = case["dim"], {name: value for name, value in case.items() if name != "dim"}
    problem = make_problem((dim, dim), **case, groups=3, batch=1)
    queries = double(problem.arguments["queries"]) * problem.arguments["scale"]
    keys = np.repeat(problem.decoded[0], 3, axis=1)
    scores = queries @ keys.swapaxes(-1, -2)
    visible = np.tril(np.ones(scores.shape[2:], bool), problem.tokens - case["length"])
    truth = np.logaddexp.reduce(np.where(visible, scores, -np.inf), axis=-1)
    result = log_sum_exp(mx.array(queries.astype(np.float32)), problem.regions())
    norms = np.linalg.norm(queries, axis=-1).max() * np.linalg.norm(keys, axis=-1).max()
    assert np.abs(double(result).ravel() - truth.ravel()).max() <= ROUNDING * (4 * norms + 2 * np.abs(truth).max())


@pytest.mark.parametrize("mask", [None, "causal", "bool", "additive"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(64, 64), (80, 48), (256, 256), (24, 24), (2, 6)])
def test_attention_to_plain_keys_and_values(dims, dtype, mask):
    length, tokens = 70, 200
    shapes = ((2, length, 6, dims[0]), (2, 3, tokens + 9, dims[0]), (2, 3, tokens, dims[1]))
    queries, keys, values = (random(shape, dtype, seed) for seed, shape in enumerate(shapes))
    queries, keys = queries.swapaxes(1, 2), keys[:, :, :tokens]
    sinks = random((6,), dtype, 3) if mask == "bool" else None
    if mask == "bool":
        mask = random((length, tokens), "float32", 4) > -0.5
    elif mask == "additive":
        mask = random((2, 1, length, tokens), dtype, 4)
    options = {"scale": dims[0] ** -0.5, "mask": mask, "sinks": sinks}
    arrays = queries, keys, values
    result, same_dtype = attention(*arrays, **options), reference(attention, *arrays, **options)
    truth = attend_exactly(*map(double, arrays), **options)
    error, allowed = (np.abs(double(x) - truth).max() for x in (result, same_dtype))
    assert result.dtype == queries.dtype
    half_ulp = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}[dtype]
    assert error <= 2 * allowed + half_ulp * np.abs(truth).max()


def test_results_do_not_depend_on_the_number_of_threads():
    problem = make_problem((64, 64), packed=2100, batch=2, groups=4, length=1, key="tq4", value="tcq3", dtype="float32")
    long = make_problem((64, 64), packed=300, batch=1, groups=4, length=90, mask="causal", dtype="float32")
    cores = os.sched_getaffinity(0)

    def results():
        rows = encode(*problem.packed, problem.layout).rows
        return [rows, problem.solve(attend), long.solve(prefill)]

    many = results()
    try:
        os.sched_setaffinity(0, {min(cores)})
        one = results()
    finally:
        os.sched_setaffinity(0, cores)
    assert all(has_same_bits(a, b) for a, b in zip(many, one, strict=True))


def test_a_nan_stays_one():
    problem = make_problem((64, 64), packed=97, length=1, dtype="float32")
    queries = problem.arguments["queries"]
    queries[0, 1, 0, 5] = float("nan")
    out = double(problem.replace(queries=queries).solve(attend))
    assert np.isnan(out[0, 1]).all()
    assert np.isfinite(out[0, 0]).all()


def test_the_reference_implementation_runs_inside_transformations():
    problem = make_problem((64, 64), packed=97, length=1, dtype="float32")
    expected = reference(problem.solve, attend)

    def attend_to(queries):
        return problem.replace(queries=queries).solve(attend)

    out = mx.compile(attend_to)(problem.arguments["queries"])
    assert mx.allclose(out, expected, atol=1e-5)
    gradient = mx.grad(lambda queries: attend_to(queries).sum())(problem.arguments["queries"])
    assert mx.isfinite(gradient).all()
