"""mlx's attention in several calls: the result of one, less memory, and no more threads than a chip has."""

import gc

import mlx.core as mx
import numpy as np
import pytest

from kernels.cases import attend_exactly, double, has_same_bits, make_problem, random, random_mask
from metal_sim.sdpa_vector import choose_kernel
from mlx_tq.kernels import backend, mlx_attention
from mlx_tq.kernels.mlx_attention import (
    AttentionShape,
    MemoryBounds,
    attention,
    is_fused,
    probe_vector_queries,
    scores_nbytes,
)
from mlx_tq.kernels.prefill import prefill

QUERY_HEADS, HEADS, LENGTH, TOKENS, DIM = 4, 2, 37, 150, 64
FEW = MemoryBounds(scores=4 * 5 * QUERY_HEADS * TOKENS * 4, decoded=1 << 30)  # five queries a call in float32
ONE_HEAD = MemoryBounds(scores=1 << 30, decoded=1)


@pytest.fixture(autouse=True)
def _mlx():
    with backend.using("reference"):
        yield


def inputs(dtype="float32", length=LENGTH, tokens=TOKENS, dim=DIM, query_heads=QUERY_HEADS):
    queries = random((1, query_heads, length, dim), dtype, seed=1)
    return queries, *(random((1, HEADS, tokens, dim), dtype, seed=seed) for seed in (2, 3))


def masks(dtype):
    yield from (None, "causal")
    for kind in ("bool", "additive"):
        yield random_mask(kind, (LENGTH, TOKENS), dtype)
        yield random_mask(kind, (1, QUERY_HEADS, LENGTH, TOKENS), dtype)
    yield from (random_mask("bool", shape, dtype) for shape in ((TOKENS,), (1, TOKENS), (1, 1, 1, TOKENS)))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("number", range(9))
@pytest.mark.parametrize("sinks", [None, [0.5, 3.0, -2.0, 1.0]])
def test_pieces_equal_one_call(dtype, number, sinks):
    arguments, mask = inputs(dtype), list(masks(dtype))[number]
    logits = None if sinks is None else mx.array(sinks, arguments[0].dtype)
    whole = attention(*arguments, scale=0.3, mask=mask, sinks=logits)
    with mlx_attention.using(FEW):
        pieces = attention(*arguments, scale=0.3, mask=mask, sinks=logits)
    if dtype == "float32":  # a BLAS sums in another order
        truth = attend_exactly(*map(double, arguments), 0.3, mask, logits)
        error, allowed = (np.abs(double(result) - truth).max() for result in (pieces, whole))
        assert error <= 2 * allowed
    else:
        assert has_same_bits(pieces, whole)


def peak_of(compute):
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(compute())
    return mx.get_peak_memory() - before


def test_scores_stay_below_the_bound():
    queries, *_ = arguments = inputs(length=512, tokens=4096)
    mx.eval(arguments)
    bounds, whole = MemoryBounds(scores=4 << 20, decoded=1 << 30), QUERY_HEADS * 512 * 4096 * 4
    shape = AttentionShape(1, QUERY_HEADS, HEADS, 512, 4096, DIM, DIM, mx.float32, causal=True)
    with mlx_attention.using(MemoryBounds(scores=1 << 40, decoded=1 << 40)):
        assert peak_of(lambda: attention(*arguments, scale=1.0, mask="causal")) > whole == scores_nbytes(shape)
    with mlx_attention.using(bounds):
        assert scores_nbytes(shape) <= bounds.scores < whole / 7
        peak = peak_of(lambda: attention(*arguments, scale=1.0, mask="causal"))
        assert peak <= scores_nbytes(shape) + 3 * queries.nbytes + 512 * 4096  # outputs, scaled queries, a mask


@pytest.mark.parametrize("normalized", [None, "blocks", "gaps"])
@pytest.mark.parametrize("mask", [None, "causal", "bool", "heads"])
def test_one_head_at_a_time_equals_all_at_once(normalized, mask):
    case = {"packed": 257, "length": 33, "normalized": normalized, "sinks": True, "groups": 2}
    problem = make_problem(**case, mask=None if mask == "heads" else mask)
    if mask == "heads":
        problem = problem.replace(mask=random_mask("bool", (1, 4, 33, problem.tokens), "float16"))
    whole = problem.solve(prefill)
    with mlx_attention.using(ONE_HEAD):
        assert has_same_bits(problem.solve(prefill), whole)


def test_one_head_is_decoded_at_a_time():
    problem = make_problem(packed=4000, length=9, batch=1, dims=(128, 128), dtype="float32")
    mx.eval(problem.arguments["queries"], problem.rows)
    whole = peak_of(lambda: problem.solve(prefill))
    with mlx_attention.using(ONE_HEAD):
        assert peak_of(lambda: problem.solve(prefill)) < 0.6 * whole


@pytest.mark.parametrize("tokens", [64, 1024, 8192])
@pytest.mark.parametrize("groups", [1, 4, 8, 16])
@pytest.mark.parametrize("length", [1, 4, 8])
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256, 80])
def test_a_few_queries_are_fused_where_mlx_has_a_vector_kernel(dim, length, groups, tokens):
    shape = AttentionShape(1, groups, 1, length, tokens, dim, dim, mx.float16, causal=True)
    assert is_fused(shape, "metal") == (choose_kernel(dim, groups, length, tokens) is not None)
    assert not is_fused(shape, None)


@pytest.mark.parametrize(
    ("dims", "queries", "tokens", "dtype", "causal", "metal", "cuda"),
    [
        ((128, 128), 2048, 65536, mx.float16, True, True, True),
        ((128, 128), 2048, 65536, mx.float32, True, True, False),
        ((80, 80), 512, 512, mx.bfloat16, False, True, True),
        ((112, 112), 512, 512, mx.bfloat16, False, False, True),
        ((192, 128), 512, 512, mx.bfloat16, True, False, False),
        ((256, 256), 2048, 65536, mx.float16, True, False, False),
        ((256, 256), 2048, 2048, mx.float16, True, True, False),
        ((256, 256), 1024, 1024, mx.float16, True, False, False),
        ((256, 256), 2048, 2048, mx.float32, True, False, False),
    ],
)
def test_where_prefill_is_fused(dims, queries, tokens, dtype, causal, metal, cuda):
    shape = AttentionShape(1, 8, 2, queries, tokens, *dims, dtype, causal=causal)
    assert (is_fused(shape, "metal"), is_fused(shape, "cuda"), is_fused(shape, None)) == (metal, cuda, False)


@pytest.mark.parametrize(("limit", "most"), [(1024, 8), (896, 7), (448, 3), (128, 1)])
def test_a_call_that_needs_too_many_threads_is_split(monkeypatch, limit, most):
    """mlx raises where queries times query heads of a KV head, at 32 threads each, exceed the chip's limit."""
    run, groups, lengths = mx.fast.scaled_dot_product_attention, 4, []

    def limited(queries, keys, values, **options):
        if 32 * queries.shape[2] * queries.shape[1] // keys.shape[1] > limit:
            raise RuntimeError("Threadgroup size is greater than the maximum allowed")
        lengths.append(queries.shape[2])
        return run(queries, keys, values, **options)

    arguments = inputs("float16", length=8, dim=256, query_heads=groups * HEADS)
    expected = attention(*arguments, scale=0.1, mask="causal")
    monkeypatch.setattr(mlx_attention, "_vector_queries", {})
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", limited)
    probe_vector_queries(256, 256, groups, mx.float16)
    assert lengths.pop() == most
    out = attention(*arguments, scale=0.1, mask="causal")
    assert max(lengths) <= most
    assert sum(lengths) == 8
    assert has_same_bits(out, expected)
