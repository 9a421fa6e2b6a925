"""Attention problems on a compressed cache, their float64 solution, and the error that is allowed.

A kernel is right when its error is at most twice that of mx.fast attention, in the same type, over the decoded cache.
The error is the root mean square over the output, which is steady; the largest is bounded too, so that no part hides.
"""

import math
import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_tq.codec import CodecOptions, RowLayout, get_format
from mlx_tq.codec.dtypes import dtype_name

DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}  # half an ulp of 1
DIMS = (*((dim, dim) for dim in (48, 64, 80, 96, 112, 128, 192, 256, 512)), (192, 128))
PARAMETERS: dict[str, Sequence] = {
    "dims": DIMS,
    "body": (0, 1, 2, 31, 32, 33, 97, 255, 256, 257, 1025),
    "batch": (1, 3),
    "groups": (1, 2, 4, 7, 8, 16),
    "length": (1, 2, 3, 4, 5, 6, 7, 8),
    "key": ("fp16", "q8", "tq4", "tq3", "tq2"),
    "value": ("fp16", "q8", "tq4", "tq3", "tq2"),
    "dtype": tuple(DTYPES),
    "prefix": (0, 5, 128),
    "recent": (0, 6, 70),
    "mask": (None, "causal"),
    "sinks": (False, True),
}
HEADS = 2
# Of the largest error in a thousand cases. In fp32 it is that of a score: a lane sums D products one after the other,
# the reference in 16 sums or more, which sqrt(16) times less rounding reaches.
LONG_RUN_PEAK = 6.0
SPARE = 3  # rows of unused capacity


class Problem(NamedTuple):
    """Arguments of a kernel, and what it stands for.

    decoded: keys and values of all tokens in logical order, float64 [B, H, S, D].
    plain: the same in the model's type, decoded by the codec.
    """

    arguments: dict
    decoded: tuple[np.ndarray, np.ndarray]
    plain: tuple[mx.array, mx.array]

    @property
    def queries(self) -> mx.array:
        return self.arguments["queries"]

    @property
    def tokens(self) -> int:
        return self.decoded[0].shape[2]

    def solve(self, kernel, mask=None, sinks=None) -> mx.array:
        return kernel(**self.arguments, mask=mask, sinks=sinks)


def double(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32), np.float64)


def poison(rows: mx.array, spare: int = SPARE, word: int = 0xFFFFFFFF) -> mx.array:
    """Rows with unused capacity of garbage; with all ones, every scale and every fp16 value there is NaN."""
    batch, heads, _, words = rows.shape
    return mx.concatenate([rows, mx.full((batch, heads, spare, words), word, mx.uint32)], axis=2)


def make_problem(
    dims: tuple[int, int] = (64, 64),
    body: int = 97,
    batch: int = 2,
    groups: int = 2,
    length: int = 3,
    key: str = "q8",
    value: str = "tq4",
    dtype: str = "float16",
    prefix: int = 5,
    recent: int = 6,
    seed: int = 0,
    rotation: str = "wht",
) -> Problem:
    """A random cache of `prefix | body | tail`; the tail is `recent` tokens and the queries' own."""
    rng = np.random.default_rng(seed)
    kind = DTYPES[dtype]

    def gaussian(heads: int, tokens: int, dim: int) -> mx.array:
        return mx.array(rng.standard_normal((batch, heads, tokens, dim)).astype(np.float32)).astype(kind)

    layout = RowLayout(
        get_format(key).codec(dims[0], CodecOptions(seed=42, scale="ls", rotation=rotation), kind),
        get_format(value).codec(dims[1], CodecOptions(seed=43, scale="ls", rotation=rotation), kind),
    )
    tokens = prefix + recent + length
    full = [gaussian(HEADS, tokens, dim) for dim in dims]
    packed = [gaussian(HEADS, body, dim) for dim in dims]
    decoded, plain = [], []
    for codec, x, stored in zip((layout.key, layout.value), full, packed, strict=True):
        encoded = codec.encode(stored)
        rotated = double(codec.decode_rotated(encoded))
        exact = rotated if codec.rotation is None else rotated @ double(codec.rotation.matrix)
        original = double(x)
        decoded.append(np.concatenate([original[:, :, :prefix], exact, original[:, :, prefix:]], axis=2))
        parts = [x[:, :, :prefix], codec.decode(encoded).astype(kind), x[:, :, prefix:]]
        plain.append(mx.concatenate(parts, axis=2))
    arguments = {
        "queries": gaussian(HEADS * groups, length, dims[0]),
        "rows": poison(layout.encode(*packed).rows),
        "body": body,
        "layout": layout,
        "keys": full[0],
        "values": full[1],
        "prefix": prefix,
        "scale": 1 / math.sqrt(dims[0]),
    }
    return Problem(arguments, tuple(decoded), tuple(plain))


def random_sinks(problem: Problem) -> mx.array:
    """One logit for each query head, in the model's type."""
    logits = np.random.default_rng(9).standard_normal(problem.queries.shape[1]).astype(np.float32)
    return mx.array(logits).astype(problem.queries.dtype)


def expected(problem: Problem, mask: mx.array | str | None = None, sinks: mx.array | None = None) -> np.ndarray:
    """Attention in float64 over the decoded cache."""
    keys, values = problem.decoded
    queries = double(problem.queries)
    batch, query_heads, length, dim = queries.shape
    grouped = queries.reshape(batch, HEADS, -1, dim) @ keys.swapaxes(-1, -2) * problem.arguments["scale"]
    scores = grouped.reshape(batch, query_heads, length, problem.tokens)
    if isinstance(mask, str):
        visible = np.tril(np.ones((length, problem.tokens), bool), problem.tokens - length)
        scores = np.where(visible, scores, -np.inf)
    elif mask is not None:
        scores = np.where(np.array(mask), scores, -np.inf) if mask.dtype == mx.bool_ else scores + double(mask)
    peak = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - peak)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total += np.exp(double(sinks)[:, None, None] - peak)
    weights = (weights / total).reshape(batch, HEADS, -1, problem.tokens)
    return (weights @ values).reshape(batch, query_heads, length, -1)


def assert_as_good_as_reference(problem: Problem, out: mx.array, mask=None, sinks=None, *, peak: float = 2.0) -> None:
    """Compare errors with those of mx.fast attention in the same type: mean at most 2x, largest at most `peak`x.

    Half an ulp of the largest output is granted: both are rounded to the type, and the reference may be exact by luck.
    """
    truth = expected(problem, mask, sinks)
    keys, values = problem.plain
    scale = problem.arguments["scale"]
    reference = mx.fast.scaled_dot_product_attention(problem.queries, keys, values, scale=scale, mask=mask, sinks=sinks)
    assert out.shape == reference.shape
    assert out.dtype == reference.dtype == problem.queries.dtype
    error, allowed = np.abs(double(out) - truth), np.abs(double(reference) - truth)
    assert np.isfinite(error).all()
    floor = ROUNDING[dtype_name(out.dtype)] * np.abs(truth).max()
    assert rms(error) <= 2 * rms(allowed) + floor / 2
    assert error.max() <= peak * allowed.max() + floor


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(x * x)))


def random_cases(parameters: Mapping[str, Sequence], count: int, seed: int = 0) -> list[dict]:
    rng = random.Random(seed)
    return [{name: rng.choice(values) for name, values in parameters.items()} for _ in range(count)]


def random_mask(problem: Problem, kind: str) -> mx.array:
    """A "bool" or an "additive" mask array [L, S]; each query sees its own token."""
    length = problem.queries.shape[2]
    rng = np.random.default_rng(8)
    visible = rng.random((length, problem.tokens)) < 0.6
    visible[np.arange(length), np.arange(-length, 0)] = True
    if kind == "bool":
        return mx.array(visible)
    return mx.array(np.where(visible, rng.standard_normal(visible.shape), -np.inf)).astype(problem.queries.dtype)


def run_case(kernel, case: Mapping, seed: int, peak: float = 2.0) -> None:
    """Solve a case and compare."""
    sizes = dict(case)
    mask, with_sinks = sizes.pop("mask"), sizes.pop("sinks")
    problem = make_problem(**sizes, seed=seed)
    if mask in ("bool", "additive"):
        mask = random_mask(problem, mask)
    sinks = random_sinks(problem) if with_sinks else None
    assert_as_good_as_reference(problem, problem.solve(kernel, mask, sinks), mask, sinks, peak=peak)
