"""Attention of many queries over a decoded past: as accurate as mx.fast attention over the decoded cache.

Queries and tail keys are rounded to the model's type once more, after rotation. On average that costs up to 1.3x the
reference's error; the largest error is one query's with large scores, and varies more than that from seed to seed.
"""

import mlx.core as mx
import numpy as np
import pytest
from attention_cases import (
    PARAMETERS,
    assert_as_good_as_reference,
    double,
    make_problem,
    poison,
    random_cases,
    random_sinks,
    run_case,
)
from covering import case_id, covering

from mlx_tq.kernels.attend import attend
from mlx_tq.kernels.dequantize import dequantize
from mlx_tq.kernels.prefill import prefill

LENGTHS = {**PARAMETERS, "length": (1, 8, 9, 17, 32, 33, 64, 100)}
FEWER = {**LENGTHS, "length": (1, 9, 32, 33, 100), "body": (0, 1, 33, 97, 257), "groups": (1, 4, 7)}
CASES = covering(FEWER)
PEAK = 4.0


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case_id(case) for case in CASES])
def test_error_is_at_most_twice_the_reference(number):
    run_case(prefill, CASES[number], seed=number, peak=PEAK)


@pytest.mark.full
@pytest.mark.parametrize("part", range(10))
def test_error_in_random_cases(part):
    for number, case in enumerate(random_cases(LENGTHS, 50, seed=part)):
        run_case(prefill, case, seed=1000 * part + number, peak=PEAK)


@pytest.mark.parametrize("key", ["q8", "tq4", "tq3", "tq2"])
def test_haar(key):
    problem = make_problem(key=key, value="tq3", length=17, rotation="haar")
    assert_as_good_as_reference(problem, problem.solve(prefill, "causal"), "causal", peak=PEAK)


@pytest.mark.parametrize("length", [1, 3, 8])
@pytest.mark.parametrize("mask", [None, "causal"])
def test_both_kernels_agree(length, mask):
    problem = make_problem(length=length, dtype="float32")
    sinks = random_sinks(problem)
    assert mx.allclose(problem.solve(prefill, mask, sinks), problem.solve(attend, mask, sinks), rtol=1e-4, atol=2e-6)


def test_unused_capacity_is_never_read():
    problem = make_problem(body=33, length=17)
    rows = problem.arguments["rows"][:, :, :33]
    outputs = []
    for spare, word in ((1, 0xFFFFFFFF), (300, 0x7E007E00), (5, 0), (0, 0)):
        problem.arguments["rows"] = poison(rows, spare, word)
        outputs.append(problem.solve(prefill, "causal"))
    assert all(mx.array_equal(out, outputs[0]) for out in outputs)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("key", ["fp16", "q8", "tq4", "tq3", "tq2"])
def test_dequantize_stays_in_rotated_space(key, dtype):
    problem = make_problem(key=key, dtype=dtype, prefix=0, recent=0)
    layout, body = problem.arguments["layout"], problem.arguments["body"]
    kind = problem.queries.dtype
    found = dequantize(problem.arguments["rows"][:, :, :body], layout, kind)
    for codec, array, decoded in zip((layout.key, layout.value), found, problem.decoded, strict=True):
        assert array.dtype == kind
        back = double(array) if codec.rotation is None else double(array) @ double(codec.rotation.matrix)
        assert np.allclose(back, decoded[:, :, :body], atol=4e-2 if dtype == "bfloat16" else 5e-3)


def test_empty_body_is_mx_fast_attention():
    problem = make_problem(body=0, length=17)
    keys, values = problem.plain
    plain = mx.fast.scaled_dot_product_attention(
        problem.queries, keys, values, scale=problem.arguments["scale"], mask="causal"
    )
    assert mx.array_equal(problem.solve(prefill, "causal"), plain)
