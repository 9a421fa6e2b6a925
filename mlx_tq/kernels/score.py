"""Scores of packed keys for one eviction round."""

from functools import cache, partial

import mlx.core as mx
import numpy as np

from mlx_tq.codec.formats import Codec, Encoded
from mlx_tq.codec.normalization import KeyNormalization, decode_rotated_keys
from mlx_tq.codec.rotation import WalshHadamard, rotate, rotate_back
from mlx_tq.codec.rows import RowLayout
from mlx_tq.kernels import arguments, backend
from mlx_tq.kernels.cpu.score import launch_score
from mlx_tq.kernels.gpu import Kernel, fit_simdgroups, simdgroup_grid

SCORE = Kernel(
    "score",
    inputs=("packed_rows", "key_flips", "virtual_queries", "pair_weights", "rope_pairs", "score_sizes"),
    outputs=("key_scores",),
    normalized=("key_scale", "key_means", "mean_index"),
)
SIMDGROUPS = 4


def _launch(
    rows: mx.array,
    tokens: int,
    layout: RowLayout,
    queries: mx.array,
    weights: mx.array,
    pairs: mx.array,
    normalization: KeyNormalization | None = None,
) -> mx.array:
    arguments.check_can_run(layout)
    batch, heads = rows.shape[:2]
    count = pairs.shape[1]
    # Without pairs the kernel reads neither array, but arrays must not be empty.
    pair_inputs = [weights, pairs] if count else [arguments.small_input([], mx.float32), arguments.small_input([])]
    inputs = [
        rows.view(mx.uint16),
        arguments.sign_flips(layout.key.rotation),
        *(mx.contiguous(x) for x in (queries, *pair_inputs)),
        arguments.small_input([tokens, count]),
        *arguments.key_groups(layout.key, batch, heads),
        *arguments.normalization_inputs(normalization, tokens),
        *arguments.trellis_levels(layout.key, layout.value),
    ]
    constants = (("NORMALIZED", normalization is not None), *arguments.layout_constants(layout))
    (scores,) = fit_simdgroups(
        SIMDGROUPS,
        lambda simdgroups: SCORE.run(
            inputs=inputs,
            constants=(("SIMDGROUPS", simdgroups), *constants),
            **simdgroup_grid(tokens, simdgroups, batch * heads),
            output_shapes=[(batch, heads, queries.shape[1], tokens)],
            output_dtypes=[mx.float32],
        ),
    )
    return scores


@backend.dispatch(_launch, launch_score)
def score(
    rows: mx.array,
    tokens: int,
    layout: RowLayout,
    queries: mx.array,
    weights: mx.array,
    pairs: mx.array,
    normalization: KeyNormalization | None = None,
) -> mx.array:
    """Return <query, K> + sum_f weight_f |K_f| of packed keys K with parts K_f in RoPE pairs: fp32 [B, H, G, tokens].

    Rows uint32 [B, H, capacity, W] are read up to `tokens`, at least 1. Virtual queries after RoPE are fp32 [H, G, Dk],
    weights of norms fp32 [H, G, F], and the two dims of each pair int32 [2, F]; F may be 0. If keys are normalized, the
    dims of a pair have one scale.
    """
    encoded, rotation = layout.keys(rows[:, :, :tokens]), layout.key.rotation
    is_sylvester = isinstance(rotation, WalshHadamard) and rotation.order == 1
    if is_sylvester and np.array_equal(np.array(pairs).ravel(), np.arange(layout.key.head_dim)):
        return _score_halves(layout.key, encoded, queries, weights, normalization)
    keys = rotate_back(decode_rotated_keys(layout.key, encoded, normalization), rotation)
    if normalization is not None:
        keys = keys / normalization.scale[:, :, None]
    scores = queries @ keys.swapaxes(-1, -2)
    if pairs.shape[1]:
        first, second = (_take_dims(keys, index) for index in pairs)
        norms = mx.sqrt(first * first + second * second)  # two thirds of the time of mx.square
        scores = scores + weights @ norms.swapaxes(-1, -2)
    return scores


def _score_halves(
    codec: Codec, encoded: Encoded, queries: mx.array, weights: mx.array, normalization: KeyNormalization | None
) -> mx.array:
    """Compute `score` in half the time where RoPE pairs dims f and f + D / 2, without rotating whole keys back.

    The last stage of Sylvester's transform makes (a + b) / sqrt(2) and (a - b) / sqrt(2) of the transforms a and b of a
    key's halves. The norm of a RoPE pair is sqrt(a^2 + b^2) over its scale: it needs neither that stage nor the signs.
    The last stage of a and of b, on quarters of a key, is part of `_norms`.
    """
    keys, quarter = decode_rotated_keys(codec, encoded, normalization), codec.head_dim // 4
    if normalization is not None:
        scale = normalization.scale[:, :, None]
        queries, weights = queries / scale, weights / scale[..., : 2 * quarter]
    quarters = keys.reshape(*keys.shape[:-1], 4, quarter) @ _hadamard(quarter)
    norms = _norms(*(quarters[..., i, :] for i in range(4)))
    # Keys times queries take two thirds of the time of queries times keys.
    scores = keys @ rotate(queries, codec.rotation).swapaxes(-1, -2)
    for norm, weight in zip(norms, mx.split(weights / 2**0.5, 2, axis=-1), strict=True):
        scores = scores + norm @ weight.swapaxes(-1, -2)
    return scores.swapaxes(-1, -2)


@partial(mx.compile, shapeless=True)
def _norms(a: mx.array, b: mx.array, c: mx.array, d: mx.array) -> list[mx.array]:
    return [mx.sqrt(mx.square(a + b) + mx.square(c + d)), mx.sqrt(mx.square(a - b) + mx.square(c - d))]


@cache
def _hadamard(dim: int) -> mx.array:
    """Return Sylvester's matrix, fp32 [D, D]: on a CPU a product takes half the time of mlx's transform."""
    return mx.hadamard_transform(mx.eye(dim))


def _take_dims(keys: mx.array, index: mx.array) -> mx.array:
    """Return some dims of keys [..., D]: a slice where they are evenly spaced, as in every RoPE of mlx-lm."""
    dims: list[int] = index.tolist()  # type: ignore[assignment]
    step = dims[1] - dims[0] if len(dims) > 1 else 1
    if dims == list(range(dims[0], dims[-1] + 1, step)):
        return keys[..., dims[0] : dims[-1] + 1 : step]
    return mx.take(keys, index, axis=-1)
