"""The roundings of published KV caches as formulas: KVarN, OSCAR, OScaR, KIVI, and mlx's and ggml's integers.

They follow the papers and their published settings. Scales and offsets are rounded to fp16, codes are not packed. Where
there is a choice, the more accurate one is taken: offsets are fp16 numbers and not integers, and KVarN's scales may be
smaller than one, as values of small models are.

- KVarN (arXiv 2606.03458): Hadamard transform, then standard deviations of tokens and channels are divided out in turns
  in each tile of 128 tokens, best of 16 rounds; then integers, of keys by channel, of values by token.
- OSCAR (arXiv 2605.17757): one rotation U H P for the heads of a layer: eigenvectors of the queries' covariance (keys)
  or of the values' covariance weighted by attention energy, Hadamard, bit-reversed order of eigenvalues. Tokens are
  clipped at a quantile of their size (.96, .92), then integers in groups of up to 128 dims.
- OScaR (arXiv 2605.19660): Hadamard, keys over the token's norm in all heads, then integers by channel in groups of
  tokens; values by token.
- KIVI (arXiv 2402.02750): integers, of keys by channel in groups of 32 tokens, of values in groups of 32 dims.

No figure of theirs can be reproduced here: all are tasks of models from 1.7B weights on. tests/evaluate/
test_peer_formulas.py compares each formula with a scalar loop.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial

import mlx.core as mx
import numpy as np

from benchmarks.quality.rounded_cache import BLOCK, SINKS, Formula, LayerRows, round_blocks
from mlx_tq.codec.rotation import get_rotation, rotate, rotate_back

KVARN_ROUNDS = 16
OSCAR_CLIP = (0.96, 0.92)  # quantiles of |x| at which keys and values are clipped
_OSCAR_GROUP = 128
_LEAST = 1e-8
_LOG_SCALE = 9.0  # of KVarN's scales, at most: fp16 has them as normal numbers, and channels of zeros stay finite


def to_fp16(x: mx.array) -> mx.array:
    return x.astype(mx.float16).astype(mx.float32)


def hadamard_rotate(x: mx.array) -> mx.array:
    return rotate(x, get_rotation("wht", x.shape[-1], 0))


def hadamard_rotate_back(x: mx.array) -> mx.array:
    return rotate_back(x, get_rotation("wht", x.shape[-1], 0))


def round_to_integers(x: mx.array, bits: int, axis: int) -> mx.array:
    """Round to the 2^bits numbers from the least to the largest along an axis."""
    low, high = x.min(axis=axis, keepdims=True), x.max(axis=axis, keepdims=True)
    low, step = to_fp16(low), to_fp16(mx.maximum((high - low) / (2**bits - 1), _LEAST))
    return mx.clip(mx.round((x - low) / mx.maximum(step, _LEAST)), 0, 2**bits - 1) * step + low


def round_groups(x: mx.array, bits: int, group: int, axis: int) -> mx.array:
    """Round groups of neighbors along an axis, -1 or -2, to integers."""
    group = min(group, x.shape[axis])
    shape = [*x.shape]
    shape[axis : len(shape) if axis == -1 else axis + 1] = [x.shape[axis] // group, group]
    return round_to_integers(x.reshape(shape), bits, axis).reshape(x.shape)


def balance_variance(tile: mx.array) -> tuple[mx.array, mx.array]:
    """Return the scales of the columns and rows of tiles [..., T, D], after which all deviations are about one."""
    columns = mx.zeros((*tile.shape[:-2], 1, tile.shape[-1]))
    rows = mx.zeros((*tile.shape[:-1], 1))
    best, least = (columns, rows), mx.full((*tile.shape[:-2], 1, 1), np.inf)
    for _ in range(KVARN_ROUNDS + 1):
        balanced = tile * mx.exp(-columns - rows)
        by_column = _deviation(balanced, -2)
        by_row = _deviation(balanced, -1)
        spread = _ratio(by_column, -1) + _ratio(by_row, -2)
        is_best = spread < least
        least = mx.minimum(spread, least)
        best = tuple(mx.where(is_best, new, old) for new, old in zip((columns, rows), best, strict=True))
        columns = mx.clip(columns + mx.log(mx.maximum(by_column, _LEAST)), -_LOG_SCALE, _LOG_SCALE)
        by_row = _deviation(tile * mx.exp(-columns - rows), -1)
        rows = mx.clip(rows + mx.log(mx.maximum(by_row, _LEAST)), -_LOG_SCALE, _LOG_SCALE)
    return mx.exp(best[0]), mx.exp(best[1])


def _deviation(x: mx.array, axis: int) -> mx.array:
    """Return standard deviations; mlx's own lose them next to a large mean."""
    return mx.sqrt(mx.square(x - x.mean(axis=axis, keepdims=True)).mean(axis=axis, keepdims=True))


def _ratio(deviations: mx.array, axis: int) -> mx.array:
    return deviations.max(axis=axis, keepdims=True) / mx.maximum(deviations.min(axis=axis, keepdims=True), _LEAST)


def kvarn_tile(x: mx.array, bits: int, *, by_channel: bool) -> mx.array:
    """Round tiles [..., T, D], whose channels (keys) or tokens (values) have a step and an offset."""
    rotated = hadamard_rotate(x)
    columns, rows = balance_variance(rotated)
    found = round_to_integers(rotated / columns / rows, bits, -2 if by_channel else -1)
    return hadamard_rotate_back(found * to_fp16(columns) * to_fp16(rows))


def kvarn(bits: int) -> Formula:
    def side(by_channel: bool, rows: mx.array, stop: int) -> mx.array:
        return round_blocks(rows, stop, partial(kvarn_tile, bits=bits, by_channel=by_channel))

    return Formula(
        f"KVarN {bits}",
        lambda rows: side(True, rows.keys, rows.stop),
        lambda rows: side(False, rows.values, rows.stop),
        lambda heads, dim: (bits + 32 / BLOCK + 16 / dim, bits + 32 / dim + 16 / BLOCK),
        tail=(BLOCK - 1) / 2,
    )


def kivi(bits: int, group: int = 32) -> Formula:
    return Formula(
        f"KIVI {bits}",
        lambda rows: round_blocks(rows.keys, rows.stop, partial(round_groups, bits=bits, group=group, axis=-2)),
        lambda rows: round_groups(rows.values[:, :, SINKS : rows.stop], bits, group, -1),
        lambda heads, dim: (bits + 32 / group, bits + 32 / group),
        tail=(group - 1) / 2,
    )


def token_scaled_keys(x: mx.array, bits: int, group: int) -> mx.array:
    """Round rotated keys [B, H, n, T, D] by channel, after each is divided by its token's norm in all heads."""
    rotated = hadamard_rotate(x)
    norms = to_fp16(mx.sqrt(mx.square(rotated).sum(axis=(1, -1), keepdims=True)))
    return hadamard_rotate_back(round_groups(rotated / norms, bits, group, -2) * norms)


def oscar_tokens(bits: int, group: int) -> Formula:
    def values(rows: LayerRows) -> mx.array:
        rotated = hadamard_rotate(rows.values[:, :, SINKS : rows.stop])
        return hadamard_rotate_back(round_groups(rotated, bits, group, -1))

    return Formula(
        f"OScaR {bits}, groups of {group}",
        lambda rows: round_blocks(rows.keys, rows.stop, partial(token_scaled_keys, bits=bits, group=group)),
        values,
        lambda heads, dim: (bits + 32 / group + 16 / heads / dim, bits + 32 / min(group, dim)),
        tail=(BLOCK - 1) / 2,
    )


def bit_reversed(count: int) -> np.ndarray:
    """Return the numbers below a power of two in the order of their reversed bits."""
    width = count.bit_length() - 1
    return np.array([int(f"{i:0{width}b}"[::-1], 2) for i in range(count)])


def oscar_rotation(covariance: np.ndarray) -> np.ndarray:
    """Return the rotation U H P of a covariance [D, D]: columns are directions."""
    dim = len(covariance)
    energies, vectors = np.linalg.eigh(covariance)
    signs = np.array([[(-1) ** bin(i & j).count("1") for j in range(dim)] for i in range(dim)])
    order = np.empty(dim, int)
    order[bit_reversed(dim)] = np.argsort(-energies)
    return np.asarray((vectors @ (signs / np.sqrt(dim)))[:, order])


def clip_tokens(x: mx.array, quantile: float) -> mx.array:
    """Clip each vector at a quantile of the sizes of its numbers."""
    sizes = mx.sort(mx.abs(x), axis=-1)
    place = quantile * (x.shape[-1] - 1)
    low = int(place)
    limit = sizes[..., low : low + 1] * (1 - place + low) + sizes[..., low + 1 : low + 2] * (place - low)
    return mx.clip(x, -limit, limit)


def oscar_covariance(bits: int, covariances: Callable[[], Sequence[tuple[np.ndarray, np.ndarray]]]) -> Formula:
    """Return OSCAR; `covariances` gives those of queries and of values of each layer, when they are needed."""

    @cache
    def rotation(layer: int, which: int) -> mx.array:
        return mx.array(oscar_rotation(covariances()[layer][which]).astype(np.float32))

    def side(rows: LayerRows, exact: mx.array, which: int) -> mx.array:
        matrix = rotation(rows.number, which)
        clipped = clip_tokens(exact[:, :, SINKS : rows.stop] @ matrix, OSCAR_CLIP[which])
        return round_groups(clipped, bits, _OSCAR_GROUP, -1) @ matrix.T

    return Formula(
        f"OSCAR {bits}",
        lambda rows: side(rows, rows.keys, 0),
        lambda rows: side(rows, rows.values, 1),
        lambda heads, dim: (bits + 32 / min(_OSCAR_GROUP, dim),) * 2,
    )
