"""Rows that leave a layer as parts of blocks, and parts of blocks that come back to it, to the bit."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_tq.cache.blocks import LayerRows, LayerShape
from mlx_tq.cache.buffers import body_capacity, buffer
from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.codec.conditioning import MEAN_TOKENS
from mlx_tq.config import BLOCK


def row_shape(layer: CompressedKVCache) -> LayerShape:
    """What blocks hold of a layer.

    Raises:
        CacheFormatError: nothing is packed.
    """
    rows, layout, _ = layer.body()
    keys, values = layout.split_words
    return LayerShape(rows.shape[1], keys, values, layout.key.head_dim if layer.spec.condition else 0)


def departing(layer: CompressedKVCache, index: np.ndarray) -> list[tuple[int, LayerRows]]:
    """Rows of the body by their ascending indices [N], in pieces of a block each, with the first index of each.

    Waits for them.

    Raises:
        CacheFormatError: nothing is packed.
    """
    rows, layout, known = layer.body()
    keys, values = (np.array(part[0]) for part in layout.split(mx.take(rows, mx.array(index), axis=2)))
    blocks = (layer.body_positions[index] - layer.spec.prefix) // BLOCK
    starts = np.flatnonzero(np.diff(blocks, prepend=-1))
    means = [None] * len(starts)
    if known is not None:
        which = np.array(known.which(layer.body_tokens))[index[starts]]
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
    rows, layout, _ = layer.body()
    keys, values = (
        mx.array(np.concatenate(side, axis=1))[None]
        for side in ([part.keys for _, part in parts], [part.values for _, part in parts])
    )
    positions = np.concatenate([layer.body_positions, *(own for own, _ in parts)])
    order = np.argsort(positions)
    together = mx.concatenate([rows[:, :, : layer.body_tokens], layout.unsplit(keys, values)], axis=2)
    ordered = buffer([mx.take(together, mx.array(order), axis=2)], body_capacity(len(order)))
    prefix = layer.spec.prefix
    means = {(int(own[0]) - prefix) // MEAN_TOKENS: part.mean for own, part in parts if part.mean is not None}
    return layer.replace_body(ordered, positions[order], means)
