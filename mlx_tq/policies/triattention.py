"""The policy `triattention`: a token's score is the attention that later queries are expected to give to it."""

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx
import numpy as np

from mlx_tq.kernels.score import score
from mlx_tq.policies.calibration import QueryStats
from mlx_tq.policies.policy import CalibratedPolicy, PackedLayer
from mlx_tq.policies.rope import Rope


@dataclass(frozen=True, kw_only=True)
class TriAttention(CalibratedPolicy):
    """Keep the tokens that later queries are expected to attend to.

    The mean query of a head, rotated by the model's RoPE to the positions of later queries and averaged, is a virtual
    query w: <w, K> is the expected logit of a key K, times sqrt(D). The spread of the
    queries around their mean c adds sum_f (a_f - |c_f|)+ |K_f|, which keeps tokens whose queries have no common
    direction. Dims without RoPE do not count. A token's score is its softmax weight times the norm of its value,
    averaged over query heads and layers.

    Source: TriAttention (Mao et al., arXiv 2604.04921), sections 3 and 4, and TriAttention V3 (T. Turney); heads and
    layers are combined as in Expected Attention (Devoto et al., kvpress).
    """

    name: ClassVar[str] = "triattention"

    def score_layer(self, layer: PackedLayer, rope: Rope, stats: QueryStats, tokens: int, last: int) -> np.ndarray:
        scores = score_heads(layer, rope, stats, tokens, last)
        return weigh_values(scores / layer.layout.key.head_dim**0.5, layer.value_norms(tokens))


def virtual_query(rope: Rope, center: mx.array, last: int, *, unrotated: bool = True) -> mx.array:
    """Return the mean of later queries around `center`, [..., D]; `unrotated` counts dims that RoPE leaves alone."""
    query = rope.mean_rotated(center, last)
    if not unrotated and rope.unrotated.size:
        query[..., rope.unrotated] = 0
    return query


def query_spread(rope: Rope, stats: QueryStats) -> mx.array:
    """Return how much queries scatter around the center of their head, (a_f - |c_f|)+ of each pair: fp32 [Hq, F]."""
    return mx.maximum(stats.amplitude - rope.pair_norms(stats.center), 0) * rope.gain


def score_heads(
    layer: PackedLayer, rope: Rope, stats: QueryStats, tokens: int, last: int, *, unrotated: bool = False
) -> mx.array:
    """Return the scores of the first `tokens` keys for each of G query heads of H KV heads: fp32 [H, G, S]."""
    heads = layer.rows.shape[1]
    terms = (virtual_query(rope, stats.center, last, unrotated=unrotated), query_spread(rope, stats))
    query, spread = (x.reshape(heads, x.shape[0] // heads, x.shape[1]) for x in terms)

    def score_part(part: PackedLayer) -> mx.array:
        rows = part.rows
        return score(rows, rows.shape[2], layer.layout, query, spread, rope.pairs, part.normalization)[0]

    return layer.map_rows(score_part, tokens)


def weigh_values(logits: mx.array, norms: mx.array) -> np.ndarray:
    """Return the mean over heads of softmax(logits [H, G, S]) times norms of values [H, S]: float64 [S]."""
    weights = mx.softmax(logits, axis=-1, precise=True)
    return np.array((weights.mean(axis=1) * norms).mean(axis=0), np.float64)
