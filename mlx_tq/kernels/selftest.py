"""Every kernel against its twin in mlx's operations, on small random arrays, for people who have a GPU."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import mlx.core as mx

from mlx_tq.codec.formats import CodecOptions, get_format
from mlx_tq.codec.normalization import KeyNormalization, compute_block_means, compute_key_scale
from mlx_tq.codec.rows import RowLayout
from mlx_tq.kernels import backend, thresholds
from mlx_tq.kernels.attend import attend
from mlx_tq.kernels.compact import compact
from mlx_tq.kernels.dequantize import dequantize
from mlx_tq.kernels.encode import encode
from mlx_tq.kernels.recall_score import grouped, recall_score
from mlx_tq.kernels.regions import Regions
from mlx_tq.kernels.score import score
from mlx_tq.kernels.wht import wht

FORMATS = ("fp16", "q8", "tq4", "tq3", "tq2", "tcq4", "tcq3", "tcq2")
DIMS = (64, 80, 128, 256)
DTYPES = (mx.float16, mx.bfloat16, mx.float32)
_TOKENS, _HEADS, _GROUP = 97, 2, 4
# Of the largest value: what twins in fp32 may differ by, beside a rounding to the result's type.
_ROUNDINGS = 2e-5


@dataclass(frozen=True)
class KernelCheck:
    """One kernel in one case: the largest difference from its twin, and what is allowed, of the largest value."""

    kernel: str
    case: str
    difference: float
    allowed: float

    @property
    def passed(self) -> bool:
        """It is within what is allowed."""
        return self.difference <= self.allowed


def check_kernels(where: str) -> Iterator[KernelCheck]:
    """Run all kernels on `where`, "metal" or "cuda".

    Raises:
        KernelUnavailableError: there is no such GPU, or its compiler refuses a kernel.

    """
    for number, key in enumerate(FORMATS):
        for dim, dtype in zip(DIMS, (DTYPES * 2)[number % 3 :], strict=False):
            value = FORMATS[(number + DIMS.index(dim)) % len(FORMATS)]
            for normalized in (False, True):
                yield from _check_case(where, key, value, dim, dtype, normalized=normalized)


def _check_case(
    where: str, key: str, value: str, dim: int, dtype: mx.Dtype, *, normalized: bool
) -> Iterator[KernelCheck]:
    case = f"{key}/{value}, D = {dim}, {str(dtype).removeprefix('mlx.core.')}" + ", normalized" * normalized
    layout = RowLayout(
        *(get_format(name).codec(dim, CodecOptions(seed=i), dtype) for i, name in enumerate((key, value)))
    )
    shape = (2, _HEADS, _TOKENS, dim)
    keys, values = (mx.random.normal(shape, key=mx.random.key(i)).astype(dtype) for i in range(2))
    queries = mx.random.normal((2, _HEADS * _GROUP, 2, dim), key=mx.random.key(2)).astype(dtype)
    means = _normalization(keys, queries, layout) if normalized else None
    with backend.using("reference"):
        rows = encode(keys, values, layout, means).rows
    regions = Regions(rows, _TOKENS, layout, keys[:, :, :9], values[:, :, :9], 4, 9, means)
    virtual = mx.random.normal((_HEADS, _GROUP, dim), key=mx.random.key(3))
    asking = queries[:1].astype(mx.float32) * dim**-0.5
    first = means and replace(means, scale=means.scale[:1], means=means.means[:1])
    asked = grouped(asking, _HEADS, layout, first)
    pairs = mx.arange(dim, dtype=mx.int32).reshape(2, -1)

    def attended(short: int) -> list[mx.array]:
        with thresholds.using(replace(thresholds.current(), short=short)):
            return [attend(queries, regions, scale=dim**-0.5, mask="causal")]

    calls: dict[str, Callable[[], list[mx.array]]] = {
        "encode": lambda: list(encode(keys, values, layout, means)),
        "dequantize": lambda: list(dequantize(rows, layout, dtype, (keys, values), means)),
        "attend": lambda: attended(0),
        "attend_short": lambda: attended(2 * _TOKENS),
        "score": lambda: [score(rows, _TOKENS, layout, virtual, mx.abs(virtual[..., : dim // 2]), pairs, means)],
        "recall_score": lambda: list(recall_score(asked, layout.keys(rows[:1]), layout, first, [32, 33, 5, 27])),
        "compact": lambda: [compact(rows, mx.arange(0, _TOKENS, 3, dtype=mx.int32), 64)[:, :, :33]],
    }
    if layout.key.rotation is not None:
        rotation = layout.key.rotation
        calls["wht"] = lambda: [wht(queries, rotation, normalization=means), wht(keys, rotation, inverse=True)]
    for name, call in calls.items():
        with backend.using(where):
            found = call()
            mx.eval(found)
        with backend.using("reference"):
            expected = call()
        exact = found[0].dtype in (mx.uint32, mx.int32)
        allowed = 0.0 if exact else _ROUNDINGS + 2 * float(mx.finfo(found[0].dtype).eps)
        difference = max(_difference(a, b) for a, b in zip(found, expected, strict=True))
        yield KernelCheck(name, case, difference, allowed)


def _normalization(keys: mx.array, queries: mx.array, layout: RowLayout) -> KeyNormalization:
    """Weights of these keys and queries, and means of every ninth key: rows of an eviction."""
    stored, asked = (mx.sqrt(mx.square(x.astype(mx.float32)).mean(axis=2)) for x in (keys, queries))
    scale = compute_key_scale(stored, asked)
    means = compute_block_means(keys[:, :, ::9, None], scale, layout.key.rotation).means
    return KeyNormalization(scale, means, mx.arange(_TOKENS, dtype=mx.int32) // 9)


def _difference(a: mx.array, b: mx.array) -> float:
    """The largest difference, of the largest value; of integers, the share that differs."""
    if a.dtype in (mx.uint32, mx.int32):
        return (a != b).astype(mx.float32).mean().item()  # type: ignore[return-value]
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    return (mx.abs(a - b).max() / mx.abs(b).max()).item()  # type: ignore[return-value]
