"""Queries as attend_matrix.metal takes them: rotated, in half precision, with the factor of each row."""

import math
from typing import NamedTuple

import mlx.core as mx

from mlx_tq.codec.normalization import normalize_queries
from mlx_tq.codec.rotation import rotate
from mlx_tq.kernels.regions import Regions


class MatrixQueries(NamedTuple):
    """The query rows of each KV head, padded to N."""

    rotated: mx.array  # for packed tokens, fp16 [B, H, N, Dk] of magnitudes up to 1
    plain: mx.array  # for full-precision tokens, likewise
    factors: mx.array  # of their scores in powers of two, fp32 [2, B, H, N]
    mean_scores: mx.array | None  # of the means of normalized keys in powers of two, fp32 [B, H, N, means]


def matrix_queries(queries: mx.array, regions: Regions, scale: float, rows: int) -> MatrixQueries:
    """Prepare queries [B, Hq, L, Dk] for tiles of `rows` query rows."""
    batch, query_heads, length, dim = queries.shape
    heads = regions.full_keys.shape[1]
    unit = scale / math.log(2)
    q = queries.astype(mx.float32).reshape(batch, heads, -1, dim)
    q = mx.pad(q, [(0, 0), (0, 0), (0, -(query_heads // heads) * length % rows), (0, 0)])
    rotated = rotate(normalize_queries(q, regions.normalization), regions.layout.key.rotation)
    packed, packed_factor = _in_half_precision(rotated)
    plain, plain_factor = _in_half_precision(q)
    normalization, mean_scores = regions.normalization, None
    if normalization is not None:
        mean_scores = unit * (rotated @ normalization.means.astype(mx.float32).swapaxes(-1, -2))
    return MatrixQueries(packed, plain, unit * mx.stack([packed_factor, plain_factor]), mean_scores)


def _in_half_precision(q: mx.array) -> tuple[mx.array, mx.array]:
    """Return each row over its largest magnitude, and that magnitude [...]."""
    largest = mx.maximum(mx.abs(q).max(axis=-1), 2.0**-100)
    return (q / largest[..., None]).astype(mx.float16), largest
