"""What queries would make of packed keys that are not in the cache, and what they make of those that are.

Source: attention weights as importance of a block of keys, Quest (Tang et al. 2024, arXiv 2406.10774) section 3.2; here
with the real keys and the log-sum-exp of all, so that weights of different queries compare.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_tq.codec.formats import Encoded
from mlx_tq.codec.normalization import KeyNormalization, decode_rotated_keys, normalize_queries, score_means
from mlx_tq.codec.rotation import rotate
from mlx_tq.codec.rows import RowLayout
from mlx_tq.kernels import backend, build
from mlx_tq.kernels.constants import check_can_run, codec_constants, filled, means_inputs, table, with_levels
from mlx_tq.kernels.masks import apply_mask
from mlx_tq.kernels.regions import Regions

KERNEL = build.Kernel(
    "recall_score",
    inputs=("key_codes", "key_scales", "asked_queries", "block_starts", "recall_sizes"),
    outputs=("block_maxima", "block_sums"),
)
NORMALIZED = KERNEL.with_more(inputs=("key_means", "mean_index"))
SIMDGROUPS = 4
# Of a lane: decoded keys are read once for so many.
QUERIES = 8
# Packed tokens scored at a time.
BLOCK_TOKENS = 4096


class Found(NamedTuple):
    """Scores of archived keys for each of N = G L queries of a KV head.

    each: the largest score of every block, fp32 [H, N, n]. total: log-sum-exp of all scores, fp32 [H, N].
    """

    each: mx.array
    total: mx.array


def recall_score(
    asked: mx.array,
    keys: Encoded,
    layout: RowLayout,
    normalization: KeyNormalization | None,
    sizes: Sequence[int],
) -> Found:
    """Score keys.

    Args:
        asked: queries times the scale of scores, by `grouped`, fp32 [1, H, N, Dk].
        keys: side by side, [1, H, S, ...].
        layout: of the rows that they are of.
        normalization: of these keys, or None.
        sizes: tokens of each block, at least 1 each, S in all.
    """
    check = partial(check_can_run, layout)
    return backend.call(_recall_score_gpu, recall_score_ref, asked, keys, layout, normalization, sizes, check=check)


def recall_score_ref(
    asked: mx.array,
    keys: Encoded,
    layout: RowLayout,
    normalization: KeyNormalization | None,
    sizes: Sequence[int],
) -> Found:
    """`recall_score` in mlx's own operations and, what follows the products, NumPy's."""
    decoded = decode_rotated_keys(layout.key, keys, normalization)[0]
    scores = np.array(decoded @ mx.contiguous(asked[0].swapaxes(-1, -2)), copy=False)  # [H, S, N]: a block is some rows
    maxima = _maxima(scores, sizes)
    total = _log_sum_exp(scores, maxima.max(axis=1, keepdims=True), axis=1)
    return Found(mx.array(maxima.swapaxes(-1, -2)), mx.array(total))


def _maxima(scores: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """The largest of each block of scores [H, S, N]: [H, n, N]; neighbours of one size are taken together."""
    found, start = [], 0
    for size, run in groupby(sizes):
        stop = start + size * len(list(run))
        found.append(scores[:, start:stop].reshape(len(scores), -1, size, scores.shape[2]).max(axis=2))
        start = stop
    return np.concatenate(found, axis=1)


def _log_sum_exp(scores: np.ndarray, most: np.ndarray, axis: int) -> np.ndarray:
    """Of fp32 along an axis, of which they have the largest; the scores are lost.

    In a tenth of the time of mlx, whose exp takes one number after the other on a CPU.
    """
    weights = np.exp(np.subtract(scores, most, out=scores), out=scores)
    total: np.ndarray = most + np.log(weights.sum(axis=axis, keepdims=True))
    return total.squeeze(axis)


def _recall_score_gpu(
    asked: mx.array,
    keys: Encoded,
    layout: RowLayout,
    normalization: KeyNormalization | None,
    sizes: Sequence[int],
) -> Found:
    heads, tokens = keys.codes.shape[1:3]
    count, dim = asked.shape[2:]
    asked = mx.pad(asked, [(0, 0), (0, 0), (0, -count % QUERIES), (0, 0)]).reshape(heads, -1, QUERIES, dim)
    kernel, levels = with_levels(KERNEL if normalization is None else NORMALIZED, layout.key)
    maxima, sums = build.run(
        kernel,
        inputs=[
            filled(keys.codes),
            table([], mx.float32).reshape(1, 1, -1) if keys.scale is None else filled(keys.scale),
            mx.contiguous(asked.swapaxes(-1, -2)),
            filled(mx.array([0, *accumulate(sizes)], mx.int32)),
            table([count, len(sizes)]),
            *means_inputs(normalization, tokens)[1:],  # queries are divided by the weights already
            *levels,
        ],
        constants=(
            ("SIMDGROUPS", SIMDGROUPS),
            ("QUERIES", QUERIES),
            ("SPAN", 32 if dim <= 128 else 16 if dim <= 256 else 8),  # keys of at most 19 KB
            ("NORMALIZED", normalization is not None),
            *codec_constants("KEY", layout.key),
        ),
        grid=(32 * SIMDGROUPS, len(sizes), heads),
        threadgroup=(32 * SIMDGROUPS, 1, 1),
        output_shapes=[(heads, count, len(sizes))] * 2,
        output_dtypes=[mx.float32] * 2,
    )
    return Found(maxima, mx.logsumexp(maxima + mx.log(sums), axis=-1))


def grouped(queries: mx.array, heads: int, layout: RowLayout, normalization: KeyNormalization | None) -> mx.array:
    """Queries [1, Hq, L, Dk] as they meet packed keys: [1, H, G L, Dk]."""
    shape = (1, heads, -1, queries.shape[-1])
    return rotate(normalize_queries(queries, normalization).reshape(shape), layout.key.rotation)


def log_sum_exp(queries: mx.array, regions: Regions) -> mx.array:
    """The log-sum-exp of what queries see of a cache, whose last L tokens they are: fp32 [H, G L].

    Args:
        queries: times the scale of scores, fp32 [1, Hq, L, Dk].
        regions: of batch size 1.
    """
    heads, length, sink_tokens, body = regions.full_keys.shape[1], queries.shape[2], regions.sink_tokens, regions.body
    normalize_queries = mx.arange(regions.tokens - length, regions.tokens)[:, None]

    def seen(start: int, stop: int) -> mx.array:
        """Bool [L, n]: which of these columns each query sees."""
        return mx.arange(start, stop)[None] <= normalize_queries

    plain = queries.reshape(1, heads, -1, queries.shape[-1])
    scores = plain @ regions.keys.astype(mx.float32).swapaxes(-1, -2)
    beside = mx.concatenate([seen(0, sink_tokens), seen(sink_tokens + body, regions.tokens)], axis=1)
    scores = apply_mask(scores, beside, length)
    parts = [_of_each(scores)]
    if body:
        rows, layout, known = regions.packed(), regions.layout, regions.normalization
        asked = grouped(queries, heads, layout, known)
        for start, stop in pairwise([*range(0, body, BLOCK_TOKENS), body]):
            found = layout.key.scores(asked, layout.keys(rows[:, :, start:stop]))
            if known is not None:
                found = found + score_means(asked, known.after(start), stop - start)
            if length > regions.beside - sink_tokens:  # the first of them are packed already
                found = apply_mask(found, seen(sink_tokens + start, sink_tokens + stop), length)
            parts.append(_of_each(found))
    return mx.array(np.logaddexp.reduce(parts))


def _of_each(scores: mx.array) -> np.ndarray:
    """The log-sum-exp of scores [1, H, N, S]: [H, N]."""
    own = np.array(scores[0])
    return _log_sum_exp(own, own.max(axis=-1, keepdims=True), axis=-1)
