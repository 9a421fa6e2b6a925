"""Checks of each kernel on the simulator, which gets the arguments `simulation`. The mutants fail these checks."""

from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, cycle, takewhile
from typing import Any

import mlx.core as mx
import numpy as np

from kernels.cases import (
    HEADS,
    Problem,
    check_attention,
    decode_exactly,
    double,
    has_same_bits,
    make_problem,
    random,
    unrotate,
)
from kernels.metal.simulated import reference, simulated
from mlx_tq.codec import Codec
from mlx_tq.codec.formats.sorted_pairs import GROUP, SortedCodec
from mlx_tq.codec.formats.trellis import TrellisCodec
from mlx_tq.codec.normalization import KeyNormalization
from mlx_tq.codec.rotation import get_rotation
from mlx_tq.kernels import thresholds
from mlx_tq.kernels.attend import attend
from mlx_tq.kernels.encode import compact, encode
from mlx_tq.kernels.prefill import dequantize
from mlx_tq.kernels.recall_score import group_queries, recall_score
from mlx_tq.kernels.score import score
from mlx_tq.kernels.wht import wht

PEAK = 3.0  # allowed ratio of attention's largest error


def check_encode(problem: Problem, **simulation: Any) -> None:
    """Rows and health are the codec's bit for bit, also for zeros, tiny and huge values; strides put S before H."""
    vectors = []
    for x, scale in zip(problem.packed, (3.0, 0.2), strict=True):
        y = x.astype(mx.float32) * mx.array([scale, 1e-3])[:, None, None]
        y[:, 0, -1], y[:, 1, -1, 1:] = 0, 0
        y[:, 1, ::7] = y[:, 1, ::7] * 2e4
        vectors.append(mx.contiguous(y.astype(x.dtype).swapaxes(1, 2)).swapaxes(1, 2))
    arguments = *vectors, problem.layout, problem.normalization
    expected = reference(encode, *arguments)
    with simulated(**simulation) as counters:
        result = encode(*arguments)
    assert has_same_bits(result.rows, expected.rows)
    assert result.health.tolist() == expected.health.tolist()
    cost = counters[-1]  # a call before it rotates the means of normalized keys back
    assert cost.loaded["keys"] == vectors[0].nbytes, "each value is loaded once"
    assert cost.loaded["values"] == vectors[1].nbytes
    assert cost.stored["packed_rows"] == result.rows.nbytes, "each word is stored once"


def check_health(key: str, dtype: str, normalized: bool, **simulation: Any) -> None:
    """Values at and above the limit of fp16, infinities and NaN are counted as by the codec."""
    problem = make_problem((64, 80), key=key, value="tq3", dtype=dtype, packed=8)
    layout, (keys, values), normalization = problem.layout, problem.packed, None
    for i, value in enumerate((65504.0, 65536.0, 1e30, float("inf"), float("-inf"), float("nan"))):
        keys[:, 0, i, 3] = value
        values[:, 1, i, 70] = value
    keys[:, 1, 5, 0], keys[:, 1, 5, 1] = float("nan"), float("inf")
    if normalized:  # the scale makes one dim exceed fp16
        scale = mx.where(mx.arange(64) == 9, 4.0, 1.0)
        keys[:, 1, 6, 9] = -30000
        means = mx.zeros((2, HEADS, 1, 64), mx.float16)
        normalization = KeyNormalization(mx.broadcast_to(scale, (2, HEADS, 64)), means)
    expected = reference(encode, keys, values, layout, normalization)
    with simulated(**simulation):
        result = encode(keys, values, layout, normalization)
    assert result.health.tolist() == expected.health.tolist()
    finite = (mx.isfinite(keys).all(axis=-1) & mx.isfinite(values).all(axis=-1))[..., None]
    assert mx.array_equal(mx.where(finite, result.rows, 0), mx.where(finite, expected.rows, 0))


def check_dequantize(problem: Problem, **simulation: Any) -> None:
    """Packed tokens are as exact as in mlx operations, full-precision tokens the same bit for bit."""
    layout, regions = problem.layout, problem.regions()
    count, rows = regions.packed_tokens, regions.rows()
    expected = reference(dequantize, regions)
    for full_tokens in (0, regions.full_tokens):
        with simulated(**simulation) as counters:
            result = dequantize(problem.regions(full_tokens=full_tokens))
        parts = ((layout.key, layout.keys(rows), problem.normalization), (layout.value, layout.values(rows), None))
        for array, expected_array, part in zip(result, expected, parts, strict=True):
            truth = decode_exactly(*part)
            roundings = 4 * 2.0**-24 * np.abs(truth).max()  # of factor, gain, level and product, all in fp32
            allowed = max(2 * largest_error(expected_array[:, :, :count], truth), roundings)
            assert largest_error(array[:, :, :count], truth) <= allowed
            if part[1].scale is None:
                assert has_same_bits(array[:, :, :count], expected_array[:, :, :count])
            assert array.shape[2] == count + full_tokens
            if full_tokens:
                assert has_same_bits(array[:, :, count:], expected_array[:, :, count:])
        (cost,) = counters
        for name, array in zip(("keys_out", "values_out"), result, strict=True):
            assert cost.stored[name] == array.nbytes, "each value is stored once"


def check_score(problem: Problem, rotated: int = 1, **simulation: Any) -> None:
    """Scores are as exact as in mlx operations; RoPE rotates all dims, one of `rotated`, or none (0)."""
    rows, layout, tokens = problem.rows, problem.layout, problem.arguments["packed_tokens"]
    heads, dim = rows.shape[1], layout.key.head_dim
    groups = problem.arguments["queries"].shape[1] // heads
    pairs = np.random.default_rng(3).permutation(dim)[: dim // rotated if rotated else 0].reshape(2, -1)
    queries = random((heads, groups, dim), "float32", seed=2)
    weights = mx.abs(random((heads, groups, pairs.shape[1]), "float32", seed=4))
    arguments = rows, tokens, layout, queries, weights, mx.array(pairs, mx.int32), problem.normalization
    decoded = decode_exactly(layout.key, layout.keys(rows[:, :, :tokens]), problem.normalization)
    keys = unrotate(layout.key, decoded, problem.normalization)
    norms = np.sqrt(sum(keys[..., index] ** 2 for index in pairs))
    truth = np.array(queries, np.float64) @ keys.swapaxes(-1, -2)
    truth += np.array(weights, np.float64) @ norms.swapaxes(-1, -2)
    with simulated(**simulation) as counters:
        scores = score(*arguments)
    assert scores.shape == truth.shape
    roundings = 8 * 2.0**-24 * np.abs(truth).max()
    assert largest_error(scores, truth) <= max(2 * largest_error(reference(score, *arguments), truth), roundings)
    (cost,) = counters
    assert cost.stored["key_scores"] == scores.nbytes
    # Each key is loaded once for any number of query heads; each of 32 lanes loads the scale.
    scale = 0 if layout.key.scale_dtype is None else 32 * layout.key.scale_dtype.size
    codes = loads_per_word(layout.key) * 2 * layout.key.words
    assert cost.loaded["packed_rows"] == rows[..., :1, 0].size * tokens * (codes + scale)


def check_recall_score(problem: Problem, sizes: tuple[int, ...], **simulation: Any) -> None:
    """Maxima and log-sum-exp are exact up to fp32 roundings; keys are laid out as in an archive."""
    rows, layout, tokens = problem.rows, problem.layout, problem.arguments["packed_tokens"]
    normalization = problem.normalization
    queries = problem.arguments["queries"].astype(mx.float32) * problem.arguments["scale"]
    keys = layout.split_keys(layout.split(rows)[0][:, :, :tokens])
    sizes = cut(sizes, tokens)
    arguments = group_queries(queries, HEADS, layout, normalization), keys, layout, normalization, sizes
    stored = unrotate(layout.key, decode_exactly(layout.key, keys, normalization), normalization)
    truth = (double(queries).reshape(1, HEADS, -1, layout.key.head_dim) @ stored.swapaxes(-1, -2))[0]
    maxima = np.maximum.reduceat(truth, np.cumsum([0, *sizes[:-1]]), axis=-1)
    with simulated(**simulation) as counters:
        scores = recall_score(*arguments)
    # Roundings of rotation and sums grow with the norms of the vectors; the log-sum-exp has its own rounding.
    norms = np.linalg.norm(double(queries), axis=-1).max() * np.linalg.norm(stored, axis=-1).max()
    total = np.logaddexp.reduce(truth, axis=-1)
    for results in (scores, reference(recall_score, *arguments)):
        for result, exact, own in zip(results, (maxima, total), (0, np.abs(total).max()), strict=True):
            assert result.shape == exact.shape
            assert largest_error(result, exact) <= 2.0**-24 * (4 * norms + own)
    (cost,) = counters
    once = 2 * HEADS * tokens * layout.key.words
    assert cost.loaded["key_codes"] == once * loads_per_word(layout.key), "for any number of queries"


def loads_per_word(codec: Codec) -> Fraction:
    """Return how often a word of codes is loaded: the last word of a trellis unit also serves the next unit."""
    if isinstance(codec, SortedCodec):
        widths = np.broadcast_to(codec.groups.widths, (codec.groups.widths.shape[0], HEADS, codec.head_dim // GROUP))
        return 1 + Fraction(int(np.gcd(widths, 16)[widths > 0].sum()), int(widths.sum()))
    if not isinstance(codec, TrellisCodec):
        return Fraction(1)
    return Fraction(4, 3) if codec.bits == 3 else Fraction(2)


def cut(sizes: tuple[int, ...], tokens: int) -> list[int]:
    """Cut tokens into blocks of these sizes, repeated."""
    ends = [*takewhile(lambda end: end < tokens, accumulate(cycle(sizes))), tokens]
    return np.diff([0, *ends]).tolist()


def check_attend(
    problem: Problem, short_tokens: int = 0, peak: float = PEAK, level_tables: int = 2, **simulation: Any
) -> mx.array:
    """Attention is as exact as mx.fast over the decoded cache: one kernel up to `short_tokens`, else two."""
    _, query_heads, _, dim = problem.arguments["queries"].shape
    given = thresholds.current(dim, query_heads // HEADS)
    limits = replace(given, short_tokens=short_tokens, level_tables=level_tables)
    with simulated(**simulation) as counters, thresholds.using(limits):
        result = problem.solve(attend)
    assert len(counters) == (1 if problem.tokens <= short_tokens else 2)
    check_attention(problem, result, peak=peak)
    return result


def check_wht(
    x: mx.array, inverse: bool = False, normalization: KeyNormalization | None = None, **simulation: Any
) -> None:
    """Rotation is the codec's bit for bit; each value is loaded and stored once."""
    rotation = get_rotation("wht", x.shape[-1], 7)
    options = {"inverse": inverse, "normalization": normalization}
    with simulated(**simulation) as counters:
        result = wht(x, rotation, **options)
    assert has_same_bits(result, reference(wht, x, rotation, **options))
    assert counters[0].loaded["vectors"] == counters[0].stored["rotated"] == x.nbytes


def check_compact(rows: mx.array, kept: list[int], **simulation: Any) -> None:
    """The buffer has the kept rows and room for three more."""
    with simulated(**simulation):
        result = compact(rows, mx.array(kept, mx.int32), len(kept) + 3)
    assert result.shape == (*rows.shape[:2], len(kept) + 3, rows.shape[3])
    assert mx.array_equal(result[:, :, : len(kept)], mx.take(rows, mx.array(kept, mx.int32), axis=2))


def random_rows(tokens: int, words: int = 33, batch: int = 2, heads: int = 3) -> mx.array:
    return mx.array(np.random.default_rng(0).integers(0, 2**32, (batch, heads, tokens, words), np.uint32))


def largest_error(result: mx.array, truth: np.ndarray) -> float:
    return float(np.abs(np.array(result.astype(mx.float32), np.float64) - truth).max())
