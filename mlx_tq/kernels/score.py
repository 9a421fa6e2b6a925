"""Scoring packed keys by virtual queries, once an eviction round."""

from functools import cache, partial

import mlx.core as mx
import numpy as np

from mlx_tq.codec.formats import Codec, Encoded
from mlx_tq.codec.normalization import KeyNormalization, decode_rotated_keys
from mlx_tq.codec.rotation import Rotation, WalshHadamard, rotate, rotate_back
from mlx_tq.codec.rows import RowLayout
from mlx_tq.kernels import backend, build
from mlx_tq.kernels.constants import check_can_run, flips, layout_constants, means_inputs, table, with_levels

KERNEL = build.Kernel(
    "score",
    inputs=("packed_rows", "key_flips", "virtual_queries", "pair_weights", "rope_pairs", "score_sizes"),
    outputs=("key_scores",),
)
NORMALIZED = KERNEL.with_more(inputs=("key_scale", "key_means", "mean_index"))
SIMDGROUPS = 4


def score(
    rows: mx.array,
    body: int,
    layout: RowLayout,
    queries: mx.array,
    weights: mx.array,
    pairs: mx.array,
    normalization: KeyNormalization | None = None,
) -> mx.array:
    """<query, K> + sum over f of weight_f |K_f| of each packed key K in its original space.

    Args:
        rows: uint32 [B, H, capacity, W]; what lies past `body` is never read.
        body: tokens, at least 1.
        layout: of the rows.
        queries: turned virtual queries, fp32 [H, G, Dk].
        weights: of the lengths of the RoPE pairs, fp32 [H, G, F]; F may be 0.
        pairs: dims of each pair, int32 [2, F].
        normalization: of the keys, with one weight for both dims of a pair.

    Returns:
        fp32 [B, H, G, body].
    """
    check = partial(check_can_run, layout)
    return backend.call(_score_gpu, score_ref, rows, body, layout, queries, weights, pairs, normalization, check=check)


def score_ref(
    rows: mx.array,
    body: int,
    layout: RowLayout,
    queries: mx.array,
    weights: mx.array,
    pairs: mx.array,
    normalization: KeyNormalization | None = None,
) -> mx.array:
    """`score` in mlx's own operations."""
    encoded = layout.keys(rows[:, :, :body])
    if _in_halves(layout.key.rotation, pairs):
        return _score_halves(layout.key, encoded, queries, weights, normalization)
    keys = rotate_back(decode_rotated_keys(layout.key, encoded, normalization), layout.key.rotation)
    if normalization is not None:
        keys = keys / normalization.scale[:, :, None]
    found = queries @ keys.swapaxes(-1, -2)
    if pairs.shape[1]:
        first, second = (_dims(keys, index) for index in pairs)
        lengths = mx.sqrt(first * first + second * second)  # two thirds of the time that squares take
        found = found + weights @ lengths.swapaxes(-1, -2)
    return found


def _in_halves(rotation: Rotation | None, pairs: mx.array) -> bool:
    """Whether Sylvester's transform covers all dims and RoPE turns each of the first half with one of the second."""
    if not isinstance(rotation, WalshHadamard) or not rotation.sylvester:
        return False
    return pairs.size == rotation.dim and bool((np.array(pairs).ravel() == np.arange(rotation.dim)).all())


def _score_halves(
    codec: Codec, encoded: Encoded, queries: mx.array, weights: mx.array, normalization: KeyNormalization | None
) -> mx.array:
    """`score_ref` without rotating whole keys back, half of its time.

    The last step of Sylvester's transform makes (a + b) / sqrt(2) and (a - b) / sqrt(2) of the halves' own transforms a
    and b; a pair's length is sqrt(a^2 + b^2), without that step and the signs, over the weight that its dims share. The
    last step of a and of b goes into the lengths, so that a product of half as many terms is left.
    """
    keys, quarter = decode_rotated_keys(codec, encoded, normalization), codec.head_dim // 4
    if normalization is not None:
        scale = normalization.scale[:, :, None]
        queries, weights = queries / scale, weights / scale[..., : 2 * quarter]
    quarters = keys.reshape(*keys.shape[:-1], 4, quarter) @ _hadamard(quarter)
    lengths = _lengths(*(quarters[..., i, :] for i in range(4)))
    asked, parts = rotate(queries, codec.rotation), mx.split(weights / 2**0.5, 2, axis=-1)
    # Keys times queries take two thirds of the time of queries times keys.
    found = keys @ asked.swapaxes(-1, -2)
    for length, weight in zip(lengths, parts, strict=True):
        found = found + length @ weight.swapaxes(-1, -2)
    return found.swapaxes(-1, -2)


@partial(mx.compile, shapeless=True)
def _lengths(a: mx.array, b: mx.array, c: mx.array, d: mx.array) -> list[mx.array]:
    """The lengths of the pairs (a + b, c + d) and (a - b, c - d)."""
    return [mx.sqrt(mx.square(a + b) + mx.square(c + d)), mx.sqrt(mx.square(a - b) + mx.square(c - d))]


@cache
def _hadamard(dim: int) -> mx.array:
    """Sylvester's matrix, orthogonal, fp32 [D, D]: on a CPU its product takes half the time of mlx's transform."""
    return mx.hadamard_transform(mx.eye(dim))


def _dims(keys: mx.array, index: mx.array) -> mx.array:
    """Some dims of keys [..., D]; a slice where they are evenly spaced, as in every RoPE of mlx-lm."""
    dims: list[int] = index.tolist()  # type: ignore[assignment]
    step = dims[1] - dims[0] if len(dims) > 1 else 1
    if dims == list(range(dims[0], dims[-1] + 1, step)):
        return keys[..., dims[0] : dims[-1] + 1 : step]
    return mx.take(keys, index, axis=-1)


def _score_gpu(
    rows: mx.array,
    body: int,
    layout: RowLayout,
    queries: mx.array,
    weights: mx.array,
    pairs: mx.array,
    normalization: KeyNormalization | None = None,
) -> mx.array:
    batch, heads = rows.shape[:2]
    count = pairs.shape[1]
    # Arrays must not be empty, and the kernel reads none of these where there are no pairs.
    lengths = [mx.contiguous(weights), mx.contiguous(pairs)] if count else [table([], mx.float32), table([])]
    kernel, levels = with_levels(KERNEL if normalization is None else NORMALIZED, layout.key, layout.value)
    (scores,) = build.run(
        kernel,
        inputs=[
            rows.view(mx.uint16),
            flips(layout.key.rotation),
            mx.contiguous(queries),
            *lengths,
            table([body, count]),
            *means_inputs(normalization, body),
            *levels,
        ],
        constants=(
            ("SIMDGROUPS", SIMDGROUPS),
            ("NORMALIZED", normalization is not None),
            *layout_constants(layout),
        ),
        grid=(32 * SIMDGROUPS, -(-body // SIMDGROUPS), batch * heads),
        threadgroup=(32 * SIMDGROUPS, 1, 1),
        output_shapes=[(batch, heads, queries.shape[1], body)],
        output_dtypes=[mx.float32],
    )
    return scores
