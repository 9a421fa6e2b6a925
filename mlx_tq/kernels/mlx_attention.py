"""mlx's own attention in calls whose scores stay below a bound, and which the chip can run.

Where mlx has no fused kernel, it materializes the scores of all queries, [Hq, L, S]: 16 heads, 2,048 queries and 64K
tokens take 4.3 GB. Queries are independent, so several calls of fewer queries give the same result.
"""

import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import mlx.core as mx

from mlx_tq.kernels import backend, gpu
from mlx_tq.kernels.cpu.attend import launch_plain_attention
from mlx_tq.kernels.regions import Mask

VECTOR_QUERIES = 8  # up to this many queries, mlx runs its kernels for decoding

_FULL_DIMS = (64, 72, 80, 96, 128)
_VECTOR_DIMS = ((64, 64), (96, 96), (128, 128), (256, 256), (192, 128))
_MAX_VECTOR_ROWS = 32  # queries times the query heads of a KV head
_WIDE_DIM, _WIDE_QUERIES, _NAX_QUERIES = 256, 2048, 1024
_NAX_GENERATION, _NAX_MACOS = 17, (26, 2)
# Keys of the probe: from as many on, mlx cuts the tokens into blocks, with a threadgroup for all query rows.
_TWO_PASS_TOKENS = 4096


class AttentionShape(NamedTuple):
    """Shape of a call of attention; arrays as masks count as no mask."""

    batch: int
    query_heads: int
    kv_heads: int
    queries: int
    tokens: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    causal: bool


@dataclass(frozen=True)
class MemoryBounds:
    """Most bytes that attention takes temporarily, without queries and outputs."""

    scores: int  # of the calls that mlx has begun; a single query may take more
    decoded: int  # keys and values of a layer; above it, one KV head is decoded at a time

    @property
    def call_scores(self) -> int:
        """Most bytes of scores of one call.

        mlx begins up to ten operations ahead. On a GPU each may hold scores of its own; on a CPU most compute in place,
        and those of four calls are in memory (measured).
        """
        return self.scores // (4 if gpu.gpu_backend() is None else 10)


# A CPU is fastest with scores that fit its caches. A GPU needs many queries in each call.
CPU_BOUNDS = MemoryBounds(scores=64 << 20, decoded=256 << 20)
GPU_BOUNDS = MemoryBounds(scores=1 << 30, decoded=256 << 20)

_overrides: list[MemoryBounds] = []


def bounds() -> MemoryBounds:
    if _overrides:
        return _overrides[-1]
    return CPU_BOUNDS if gpu.gpu_backend() is None else GPU_BOUNDS


@contextmanager
def using(values: MemoryBounds) -> Iterator[None]:
    """Use other bounds inside a `with` block."""
    _overrides.append(values)
    try:
        yield
    finally:
        _overrides.pop()


def is_fused(shape: AttentionShape, device: str | None) -> bool:
    """Return whether mlx 0.32 has a fused kernel for a call on "metal", "cuda" or, for None, on a CPU."""
    if device is None:
        return False
    dims = shape.key_dim, shape.value_dim
    if device == "cuda":
        is_half = shape.dtype != mx.float32
        return is_half and max(dims) <= 128 and not any(dim % 8 for dim in dims)
    if shape.queries <= VECTOR_QUERIES:
        rows = shape.queries * (shape.query_heads // shape.kv_heads)
        return dims in _VECTOR_DIMS and rows <= _MAX_VECTOR_ROWS and shape.queries <= shape.tokens
    if dims == (_WIDE_DIM, _WIDE_DIM) and shape.causal and shape.dtype != mx.float32:
        is_first = shape.queries == shape.tokens >= _WIDE_QUERIES
        return is_first or (shape.queries >= _NAX_QUERIES and _has_matrix_cores())
    return dims[0] == dims[1] and dims[0] in _FULL_DIMS


@cache
def _has_matrix_cores() -> bool:
    """Return whether mlx uses the matrix cores of this Mac's GPU, which those from M5 on have."""
    generation = re.search(r"g(\d+)", str(mx.device_info().get("architecture", "")))
    version = tuple(int(part) for part in platform.mac_ver()[0].split(".")[:2] if part)
    return generation is not None and int(generation[1]) >= _NAX_GENERATION and version >= _NAX_MACOS


def query_nbytes(shape: AttentionShape) -> int:
    """Return the bytes of the scores of one query, in all heads."""
    return shape.batch * shape.query_heads * shape.tokens * shape.dtype.size


def scores_nbytes(shape: AttentionShape) -> int:
    """Return the bytes of scores that `attention` takes at most; 0 where a fused kernel runs."""
    if is_fused(shape, gpu.gpu_backend()):
        return 0
    pending = bounds().scores // bounds().call_scores
    queries = min(shape.queries, pending * max(1, bounds().call_scores // max(1, query_nbytes(shape))))
    return queries * query_nbytes(shape)


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: Mask = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Return mx.fast.scaled_dot_product_attention of the same arguments, in several calls where one takes too much."""
    length, tokens = queries.shape[2], keys.shape[2]
    most = _queries_per_call(queries, keys, values, mask)
    if length <= most:
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
    outputs: list[mx.array] = []
    size = -(-length // -(-length // most))
    for start in range(0, length, size):
        stop = min(start + size, length)
        # One after another: mlx would otherwise compute the scores of all pieces before their outputs.
        piece = mx.depends(queries[:, :, start:stop], outputs[-1:])
        visible = tokens - length + stop if isinstance(mask, str) else tokens
        rows = mask[..., start:stop, :] if isinstance(mask, mx.array) and mask.ndim > 1 and mask.shape[-2] > 1 else mask
        seen = keys[:, :, :visible], values[:, :, :visible]
        outputs.append(mx.fast.scaled_dot_product_attention(piece, *seen, scale=scale, mask=rows, sinks=sinks))
    return mx.concatenate(outputs, axis=2)


# What `attention` returns, from the CPU kernels where they are the backend: they are faster than mlx's own attention.
attend_in_full_precision = backend.dispatch(cpu=launch_plain_attention)(attention)


def _queries_per_call(queries: mx.array, keys: mx.array, values: mx.array, mask: Mask) -> int:
    batch, query_heads, length, dim = queries.shape
    _, kv_heads, tokens, value_dim = values.shape
    shape = AttentionShape(
        batch, query_heads, kv_heads, length, tokens, dim, value_dim, queries.dtype, causal=isinstance(mask, str)
    )
    if length <= VECTOR_QUERIES:
        length = _vector_queries.get((dim, value_dim, query_heads // kv_heads, queries.dtype), length)
    if is_fused(shape, gpu.gpu_backend()):
        return length
    return min(length, max(1, bounds().call_scores // max(1, query_nbytes(shape))))


# Queries of one call that the chip can run, of those shapes where it cannot run all: mlx's kernel takes 32 threads for
# each query and query head of a KV head, and the limit differs by chip, head size and dtype.
_vector_queries: dict[tuple[int, int, int, mx.Dtype], int] = {}


def probe_vector_queries(key_dim: int, value_dim: int, groups: int, dtype: mx.Dtype) -> None:
    """Find out how many queries of a shape mlx's kernel can take at once; `attention` keeps to it from then on.

    A call that exceeds the chip's limit of threads fails only when it is evaluated, too late for a forward pass.
    """
    most = min(VECTOR_QUERIES, _MAX_VECTOR_ROWS // groups)
    keys = mx.zeros((1, 1, _TWO_PASS_TOKENS, key_dim), dtype)
    values = mx.zeros((1, 1, _TWO_PASS_TOKENS, value_dim), dtype)
    for queries in range(most, 0, -1):
        try:
            rows = mx.zeros((1, groups, queries, key_dim), dtype)
            mx.eval(mx.fast.scaled_dot_product_attention(rows, keys, values, scale=1.0, mask="causal"))
        except RuntimeError:
            continue
        if queries < most:
            _vector_queries[key_dim, value_dim, groups, dtype] = queries
        return
