"""What each kernel must do, run on the simulator, where `**how` goes. The mutants fail these same checks."""

from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, cycle, takewhile
from typing import Any

import mlx.core as mx
import numpy as np
from cases import HEADS, Problem, check_attention, double, exact, make_problem, random, same_bits, unrotated
from simulated import simulated

from mlx_tq.codec import Codec
from mlx_tq.codec.formats.trellis import TrellisCodec
from mlx_tq.codec.normalization import KeyNormalization
from mlx_tq.codec.rotation import get_rotation
from mlx_tq.kernels import thresholds
from mlx_tq.kernels.attend import _attend_gpu
from mlx_tq.kernels.compact import _compact_gpu
from mlx_tq.kernels.dequantize import _dequantize_gpu, dequantize_ref
from mlx_tq.kernels.encode import _encode_gpu, encode_ref
from mlx_tq.kernels.recall_score import _recall_score_gpu, grouped, recall_score_ref
from mlx_tq.kernels.score import _score_gpu, score_ref
from mlx_tq.kernels.wht import _wht_gpu, wht_ref

PEAK = 3.0  # of attention's largest error


def encodes(problem: Problem, **how: Any) -> None:
    """Rows and flags are the codec's bit for bit, also of zeros, of tiny and of huge numbers; S comes before H."""
    vectors = []
    for x, scale in zip(problem.packed, (3.0, 0.2), strict=True):
        y = x.astype(mx.float32) * mx.array([scale, 1e-3])[:, None, None]
        y[:, 0, -1], y[:, 1, -1, 1:] = 0, 0
        y[:, 1, ::7] = y[:, 1, ::7] * 2e4
        vectors.append(mx.contiguous(y.astype(x.dtype).swapaxes(1, 2)).swapaxes(1, 2))
    expected = encode_ref(*vectors, problem.layout, problem.normalization)
    with simulated(**how) as counters:
        found = _encode_gpu(*vectors, problem.layout, problem.normalization)
    assert same_bits(found.rows, expected.rows)
    assert found.health.tolist() == expected.health.tolist()
    counted = counters[-1]  # before it, the means of normalized keys are rotated back
    assert counted.loaded["keys"] == vectors[0].nbytes, "each value is loaded once"
    assert counted.loaded["values"] == vectors[1].nbytes
    assert counted.stored["packed_rows"] == found.rows.nbytes, "each word is stored once"


def flags(key: str, dtype: str, normalized: bool, **how: Any) -> None:
    """Values at fp16's limit, above it, infinite, and no numbers: counted as the codec counts them."""
    problem = make_problem((64, 80), key=key, value="tq3", dtype=dtype, body=8)
    layout, (keys, values), normalization = problem.layout, problem.packed, None
    for i, value in enumerate((65504.0, 65536.0, 1e30, float("inf"), float("-inf"), float("nan"))):
        keys[:, 0, i, 3] = value
        values[:, 1, i, 70] = value
    keys[:, 1, 5, 0], keys[:, 1, 5, 1] = float("nan"), float("inf")
    if normalized:  # one dim of whose keys exceeds fp16 once it is weighted
        weights = mx.where(mx.arange(64) == 9, 4.0, 1.0)
        keys[:, 1, 6, 9] = -30000
        normalization = KeyNormalization(
            mx.broadcast_to(weights, (2, HEADS, 64)), mx.zeros((2, HEADS, 1, 64), mx.float16)
        )
    expected = encode_ref(keys, values, layout, normalization)
    with simulated(**how):
        found = _encode_gpu(keys, values, layout, normalization)
    assert found.health.tolist() == expected.health.tolist()
    finite = (mx.isfinite(keys).all(axis=-1) & mx.isfinite(values).all(axis=-1))[..., None]
    assert mx.array_equal(mx.where(finite, found.rows, 0), mx.where(finite, expected.rows, 0))


def dequantizes(problem: Problem, **how: Any) -> None:
    """Rows decode as exactly as mlx's operations do it; what follows them is rotated exactly as by itself."""
    layout, full, normalization = problem.layout, problem.full, problem.normalization
    rows, dtype = problem.arguments["rows"][:, :, : problem.arguments["body"]], full[0].dtype
    expected = dequantize_ref(rows, layout, dtype, full, normalization)
    for following in (None, full):
        with simulated(**how) as counters:
            found = _dequantize_gpu(rows, layout, dtype, following, normalization)
        parts = ((layout.key, layout.keys(rows), normalization), (layout.value, layout.values(rows), None))
        for out, expectation, part in zip(found, expected, parts, strict=True):
            truth, count = exact(*part), rows.shape[2]
            ours, theirs = out[:, :, :count], expectation[:, :, :count]
            roundings = 4 * 2.0**-24 * np.abs(truth).max()  # of factor, gain, level and product, all in fp32
            assert largest_error(ours, truth) <= max(2 * largest_error(theirs, truth), roundings)
            if part[1].scale is None:
                assert same_bits(ours, theirs)
            if following:
                assert same_bits(out[:, :, count:], expectation[:, :, count:])
        (counted,) = counters
        for name, out in zip(("keys_out", "values_out"), found, strict=True):
            assert counted.stored[name] == out.nbytes, "each value is stored once"


def scores(problem: Problem, turned: int = 1, **how: Any) -> None:
    """As exact as mlx's operations; RoPE turns all dims, every `turned`-th of them or, with 0, none."""
    rows, body, layout = (problem.arguments[name] for name in ("rows", "body", "layout"))
    heads, dim = rows.shape[1], layout.key.head_dim
    groups = problem.arguments["queries"].shape[1] // heads
    dims = np.random.default_rng(3).permutation(dim)[: dim // turned if turned else 0].reshape(2, -1)
    queries = random((heads, groups, dim), "float32", seed=2)
    weights = mx.abs(random((heads, groups, dims.shape[1]), "float32", seed=4))
    arguments = rows, body, layout, queries, weights, mx.array(dims, mx.int32), problem.normalization
    decoded = exact(layout.key, layout.keys(rows[:, :, :body]), problem.normalization)
    keys = unrotated(layout.key, decoded, problem.normalization)
    lengths = np.sqrt(sum(keys[..., index] ** 2 for index in dims))
    truth = np.array(queries, np.float64) @ keys.swapaxes(-1, -2)
    truth += np.array(weights, np.float64) @ lengths.swapaxes(-1, -2)
    with simulated(**how) as counters:
        found = _score_gpu(*arguments)
    assert found.shape == truth.shape
    roundings = 8 * 2.0**-24 * np.abs(truth).max()
    assert largest_error(found, truth) <= max(2 * largest_error(score_ref(*arguments), truth), roundings)
    (counted,) = counters
    assert counted.stored["key_scores"] == found.nbytes
    # Each key once, whatever the number of query heads; each of 32 lanes loads the scale.
    scale = 0 if layout.key.scale_dtype is None else 32 * layout.key.scale_dtype.size
    codes = loaded_twice(layout.key) * 2 * layout.key.words
    assert counted.loaded["packed_rows"] == rows[..., :1, 0].size * body * (codes + scale)


def recalls(problem: Problem, sizes: tuple[int, ...], **how: Any) -> None:
    """Maxima of blocks and the log-sum-exp of all, but for fp32's roundings, as the twin; keys lie as in an archive."""
    rows, body, layout, normalization = (
        problem.arguments[name] for name in ("rows", "body", "layout", "normalization")
    )
    queries = problem.arguments["queries"].astype(mx.float32) * problem.arguments["scale"]
    keys = layout.split_keys(layout.split(rows)[0][:, :, :body])
    sizes = cut(sizes, body)
    arguments = grouped(queries, HEADS, layout, normalization), keys, layout, normalization, sizes
    stored = unrotated(layout.key, exact(layout.key, keys, normalization), normalization)
    truth = (double(queries).reshape(1, HEADS, -1, layout.key.head_dim) @ stored.swapaxes(-1, -2))[0]
    maxima = np.maximum.reduceat(truth, np.cumsum([0, *sizes[:-1]]), axis=-1)
    with simulated(**how) as counters:
        found = _recall_score_gpu(*arguments)
    # Roundings of the rotation and of sums are of the vectors' lengths, however small a score is; then the total's own.
    lengths = np.linalg.norm(double(queries), axis=-1).max() * np.linalg.norm(stored, axis=-1).max()
    total = np.logaddexp.reduce(truth, axis=-1)
    for results in (found, recall_score_ref(*arguments)):
        for result, right, own in zip(results, (maxima, total), (0, np.abs(total).max()), strict=True):
            assert result.shape == right.shape
            assert largest_error(result, right) <= 2.0**-24 * (4 * lengths + own)
    (counted,) = counters
    once = 2 * HEADS * body * layout.key.words
    assert counted.loaded["key_codes"] == once * loaded_twice(layout.key), "however many ask"


def loaded_twice(codec: Codec) -> Fraction:
    """How often a word of codes is loaded: of a trellis the last one of each unit is loaded for the next one, too."""
    if not isinstance(codec, TrellisCodec):
        return Fraction(1)
    return Fraction(4, 3) if codec.bits == 3 else Fraction(2)


def cut(sizes: tuple[int, ...], tokens: int) -> list[int]:
    """So many tokens in blocks of these sizes, again and again."""
    ends = [*takewhile(lambda end: end < tokens, accumulate(cycle(sizes))), tokens]
    return np.diff([0, *ends]).tolist()


def attends(problem: Problem, short: int = 0, peak: float = PEAK, **how: Any) -> mx.array:
    """As exact as mx.fast attention over the decoded cache: up to `short` tokens in one kernel, of more in two."""
    with simulated(**how) as counters, thresholds.using(replace(thresholds.current(), short=short)):
        found = problem.solve(_attend_gpu)
    assert len(counters) == (1 if problem.tokens <= short else 2)
    check_attention(problem, found, peak=peak)
    return found


def rotates(x: mx.array, inverse: bool = False, normalization: KeyNormalization | None = None, **how: Any) -> None:
    """Bit for bit as the codec; each value is loaded and stored once."""
    rotation = get_rotation("wht", x.shape[-1], 7)
    options = {"inverse": inverse, "normalization": normalization}
    with simulated(**how) as counters:
        found = _wht_gpu(x, rotation, **options)
    assert same_bits(found, wht_ref(x, rotation, **options))
    assert counters[0].loaded["vectors"] == counters[0].stored["rotated"] == x.nbytes


def compacts(rows: mx.array, kept: list[int], **how: Any) -> None:
    """The kept rows, in a buffer with room for three more."""
    with simulated(**how):
        found = _compact_gpu(rows, mx.array(kept, mx.int32), len(kept) + 3)
    assert found.shape == (*rows.shape[:2], len(kept) + 3, rows.shape[3])
    assert mx.array_equal(found[:, :, : len(kept)], mx.take(rows, mx.array(kept, mx.int32), axis=2))


def some_rows(tokens: int, words: int = 33, batch: int = 2, heads: int = 3) -> mx.array:
    return mx.array(np.random.default_rng(0).integers(0, 2**32, (batch, heads, tokens, words), np.uint32))


def largest_error(found: mx.array, truth: np.ndarray) -> float:
    return float(np.abs(np.array(found.astype(mx.float32), np.float64) - truth).max())
