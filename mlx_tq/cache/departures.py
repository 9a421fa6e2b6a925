"""Rows that leave a layer as parts of blocks, and parts of blocks that come back to it, to the bit.

Of two formats of keys those in the second leave: a token is old then, and no younger when it comes back.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_tq.cache.blocks import LayerRows, LayerShape
from mlx_tq.cache.buffers import body_capacity, buffer
from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.cache.tiered import TieredKVCache
from mlx_tq.codec.normalization import MEAN_TOKENS, KeyNormalization, rerotate_means
from mlx_tq.codec.rows import RowLayout
from mlx_tq.config import BLOCK


def leaving(layer: CompressedKVCache) -> tuple[mx.array, RowLayout, KeyNormalization | None]:
    """As `body` of a layer, but only of tokens that may leave and come back: the first `leaving_tokens` of the body.

    Raises:
        CacheFormatError: nothing is packed.
    """
    return layer.cold_body() if isinstance(layer, TieredKVCache) else layer.body()


def leaving_tokens(layer: CompressedKVCache) -> int:
    """How many of the packed tokens may leave and come back."""
    return layer.cold_tokens if isinstance(layer, TieredKVCache) else layer.body_tokens


def normalization_of(layer: CompressedKVCache, means: np.ndarray, which: mx.array) -> KeyNormalization | None:
    """That of rows which left a layer, by the means of their pieces fp16 [n, H, D]; `which` is each row's."""
    _, layout, known = leaving(layer)
    if known is None:
        return None
    subtracted = mx.array(means.swapaxes(0, 1))[None]
    if isinstance(layer, TieredKVCache):  # means are in the domain of the first format's codes
        subtracted = rerotate_means(subtracted, layer.body_rotation, layout.key.rotation)
    return KeyNormalization(known.scale, subtracted, which)


def row_shape(layer: CompressedKVCache) -> LayerShape:
    """What blocks hold of a layer.

    Raises:
        CacheFormatError: nothing is packed.
    """
    rows, layout, _ = leaving(layer)
    keys, values = layout.split_sizes
    return LayerShape(rows.shape[1], keys, values, layout.key.head_dim if layer.spec.normalize else 0)


def departing(layer: CompressedKVCache, index: np.ndarray) -> list[tuple[int, LayerRows]]:
    """Rows of `leaving` by their ascending indices [N], in pieces of a block each, with the first index of each.

    Waits for them.

    Raises:
        CacheFormatError: nothing is packed.
    """
    rows, layout, known = leaving(layer)
    keys, values = (np.array(part[0]) for part in layout.split(mx.take(rows, mx.array(index), axis=2)))
    blocks = (layer.body_positions[index] - layer.spec.sinks) // BLOCK
    starts = np.flatnonzero(np.diff(blocks, prepend=-1))
    means = [None] * len(starts)
    if known is not None:
        which = np.array(known.mean_index(leaving_tokens(layer)))[index[starts]]
        means = list(np.array(known.means[0])[:, which].swapaxes(0, 1))
    return [
        (int(start), LayerRows(keys[:, start:stop], values[:, start:stop], mean))
        for start, stop, mean in zip(starts, [*starts[1:], len(index)], means, strict=True)
    ]


def returning(layer: CompressedKVCache, parts: Sequence[tuple[np.ndarray, LayerRows]]) -> mx.array:
    """Put rows back at their positions, which had left: the inverse of `compact`; returns the new rows.

    Args:
        layer: that they left.
        parts: positions [n] of each piece, and its rows, in any order.

    Raises:
        CacheFormatError: nothing is packed.
    """
    (rows, layout, _), count = leaving(layer), leaving_tokens(layer)
    keys, values = (
        mx.array(np.concatenate(side, axis=1))[None]
        for side in ([part.keys for _, part in parts], [part.values for _, part in parts])
    )
    positions = np.concatenate([layer.body_positions[:count], *(own for own, _ in parts)])
    order = np.argsort(positions)
    together = mx.concatenate([rows[:, :, :count], layout.unsplit(keys, values)], axis=2)
    ordered = buffer([mx.take(together, mx.array(order), axis=2)], body_capacity(len(order)))
    sinks = layer.spec.sinks
    means = {(int(own[0]) - sinks) // MEAN_TOKENS: part.mean for own, part in parts if part.mean is not None}
    replace = layer.replace_cold if isinstance(layer, TieredKVCache) else layer.replace_body
    return replace(ordered, positions[order], means)
