"""Scoring packed keys by virtual queries, once an eviction round."""

import mlx.core as mx

from mlx_tq.codec.rows import RowLayout


def score_ref(
    rows: mx.array, body: int, layout: RowLayout, queries: mx.array, weights: mx.array, pairs: mx.array
) -> mx.array:
    """<query, K> + sum over f of weight_f |K_f| of each packed key K, decoded to its original space.

    Args:
        rows: uint32 [B, H, capacity, W]; what lies past `body` is never read.
        body: tokens, at least 1.
        layout: of the rows.
        queries: turned virtual queries, fp32 [H, G, Dk].
        weights: of the lengths of the RoPE pairs, fp32 [H, G, F]; F may be 0.
        pairs: dims of each pair, int32 [2, F].

    Returns:
        fp32 [B, H, G, body].
    """
    keys = layout.key.decode(layout.keys(rows[:, :, :body]))
    found = queries @ keys.swapaxes(-1, -2)
    if pairs.shape[1]:
        lengths = mx.sqrt(mx.square(keys[..., pairs[0]]) + mx.square(keys[..., pairs[1]]))
        found = found + weights @ lengths.swapaxes(-1, -2)
    return found
