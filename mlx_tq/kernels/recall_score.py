"""Scores of archived keys, for recall, and the log-sum-exp of a cache's own scores to compare them with.

Source: Quest (Tang et al. 2024, arXiv 2406.10774), section 3.2, ranks blocks of keys by their attention. Here the keys
are the real ones, and the log-sum-exp makes weights of different queries comparable.
"""

from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_tq.codec.formats import Encoded
from mlx_tq.codec.normalization import KeyNormalization, decode_rotated_keys, normalize_queries, score_means
from mlx_tq.codec.rotation import rotate
from mlx_tq.codec.rows import RowLayout
from mlx_tq.kernels import arguments, backend
from mlx_tq.kernels.cpu.attend import launch_log_sum_exp
from mlx_tq.kernels.cpu.score import launch_recall_score
from mlx_tq.kernels.gpu import Kernel, fit_simdgroups, simdgroup_grid
from mlx_tq.kernels.regions import Regions, apply_mask

RECALL_SCORE = Kernel(
    "recall_score",
    inputs=("key_codes", "key_scales", "query_tiles", "block_starts", "recall_sizes"),
    outputs=("block_maxima", "block_sums"),
    normalized=("key_means", "mean_index"),
)
SIMDGROUPS = 4
QUERIES = 8  # queries of a lane, for which it reads a decoded key once
BLOCK_TOKENS = 4096  # packed tokens that `log_sum_exp` scores at a time


class RecallScores(NamedTuple):
    """Scores of archived keys for N = G L queries of each KV head."""

    maxima: mx.array  # largest score of each block, fp32 [H, N, blocks]
    total: mx.array  # log-sum-exp of all scores, fp32 [H, N]


def _launch(
    queries: mx.array, keys: Encoded, layout: RowLayout, normalization: KeyNormalization | None, sizes: Sequence[int]
) -> RecallScores:
    arguments.check_can_run(layout)
    heads, tokens = keys.codes.shape[1:3]
    count, dim = queries.shape[2:]
    tiles = mx.pad(queries, [(0, 0), (0, 0), (0, -count % QUERIES), (0, 0)]).reshape(heads, -1, QUERIES, dim)
    inputs = [
        arguments.pad_input(keys.codes),
        arguments.small_input([], mx.float32).reshape(1, 1, -1)
        if keys.scale is None
        else arguments.pad_input(keys.scale),
        mx.contiguous(tiles.swapaxes(-1, -2)),
        arguments.pad_input(mx.array([0, *accumulate(sizes)], mx.int32)),
        arguments.small_input([count, len(sizes)]),
        *arguments.key_groups(layout.key, 1, heads),
        *arguments.normalization_inputs(normalization, tokens)[1:],  # queries are already divided by the key scale
        *arguments.trellis_levels(layout.key),
    ]
    constants = (
        ("QUERIES", QUERIES),
        ("SPAN", 32 if dim <= 128 else 16 if dim <= 256 else 8),  # decoded keys take at most 19 KB
        ("NORMALIZED", normalization is not None),
        *arguments.codec_constants("KEY", layout.key),
    )
    maxima, sums = fit_simdgroups(
        SIMDGROUPS,
        lambda simdgroups: RECALL_SCORE.run(
            inputs=inputs,
            constants=(("SIMDGROUPS", simdgroups), *constants),
            **simdgroup_grid(simdgroups * len(sizes), simdgroups, heads),
            output_shapes=[(heads, count, len(sizes))] * 2,
            output_dtypes=[mx.float32] * 2,
        ),
    )
    return RecallScores(maxima, mx.logsumexp(maxima + mx.log(sums), axis=-1))


def _launch_on_cpu(
    queries: mx.array, keys: Encoded, layout: RowLayout, normalization: KeyNormalization | None, sizes: Sequence[int]
) -> RecallScores:
    return RecallScores(*launch_recall_score(queries, keys, layout, normalization, sizes))


@backend.dispatch(_launch, _launch_on_cpu)
def recall_score(
    queries: mx.array, keys: Encoded, layout: RowLayout, normalization: KeyNormalization | None, sizes: Sequence[int]
) -> RecallScores:
    """Score archived keys [1, H, S, ...] in blocks of `sizes` tokens.

    Queries fp32 [1, H, N, Dk] are multiplied by the scale of scores and grouped by `group_queries`.
    """
    decoded = decode_rotated_keys(layout.key, keys, normalization)[0]
    scores = np.array(decoded @ mx.contiguous(queries[0].swapaxes(-1, -2)), copy=False)  # [H, S, N]
    parts, start = [], 0
    for size, run in groupby(sizes):  # blocks of one size are one operation
        stop = start + size * len(list(run))
        parts.append(scores[:, start:stop].reshape(len(scores), -1, size, scores.shape[2]).max(axis=2))
        start = stop
    maxima = np.concatenate(parts, axis=1)  # [H, blocks, N]
    total = _log_sum_exp(scores, maxima.max(axis=1, keepdims=True), axis=1)
    return RecallScores(mx.array(maxima.swapaxes(-1, -2)), mx.array(total))


def _log_sum_exp(scores: np.ndarray, maxima: np.ndarray, axis: int) -> np.ndarray:
    """Reduce scores in place; NumPy's vectorized exp takes a tenth of the time of mlx's on a CPU."""
    weights = np.exp(np.subtract(scores, maxima, out=scores), out=scores)
    total: np.ndarray = maxima + np.log(weights.sum(axis=axis, keepdims=True))
    return total.squeeze(axis)


def group_queries(queries: mx.array, heads: int, layout: RowLayout, normalization: KeyNormalization | None) -> mx.array:
    """Return queries [1, Hq, L, Dk] in the space of packed keys and grouped by KV head, [1, H, G L, Dk]."""
    grouped = normalize_queries(queries, normalization).reshape(1, heads, -1, queries.shape[-1])
    return rotate(grouped, layout.key.rotation)


@backend.dispatch(cpu=launch_log_sum_exp)
def log_sum_exp(queries: mx.array, regions: Regions) -> mx.array:
    """Return the log-sum-exp of the scores of a cache of batch size 1, fp32 [H, G L].

    Queries fp32 [1, Hq, L, Dk] are multiplied by the scale of scores; the cache's last L tokens are theirs.
    """
    heads, length = regions.full_keys.shape[1], queries.shape[2]
    sinks, packed = regions.sink_tokens, regions.packed_tokens
    query_positions = mx.arange(regions.tokens - length, regions.tokens)[:, None]

    def visible(start: int, stop: int) -> mx.array:  # [L, stop - start]
        return mx.arange(start, stop)[None] <= query_positions

    plain = queries.reshape(1, heads, -1, queries.shape[-1])
    scores = plain @ regions.keys.astype(mx.float32).swapaxes(-1, -2)
    full_mask = mx.concatenate([visible(0, sinks), visible(sinks + packed, regions.tokens)], axis=1)
    parts = [_log_sum_exp_of(apply_mask(scores, full_mask, length))]
    if packed:
        rows, layout, normalization = regions.rows(), regions.layout, regions.normalization
        rotated_queries = group_queries(queries, heads, layout, normalization)
        for start, stop in pairwise([*range(0, packed, BLOCK_TOKENS), packed]):
            scores = layout.key.scores(rotated_queries, layout.keys(rows[:, :, start:stop]))
            if normalization is not None:
                scores = scores + score_means(rotated_queries, normalization.after(start), stop - start)
            if length > regions.full_tokens - sinks:  # the first queries' own tokens are packed already
                scores = apply_mask(scores, visible(sinks + start, sinks + stop), length)
            parts.append(_log_sum_exp_of(scores))
    return mx.array(np.logaddexp.reduce(parts))


def _log_sum_exp_of(scores: mx.array) -> np.ndarray:
    """Return the log-sum-exp over tokens, [1, H, N, S] -> [H, N]."""
    array = np.array(scores[0])
    return _log_sum_exp(array, array.max(axis=-1, keepdims=True), axis=-1)
