"""TriAttention: a token is worth what the queries to come are expected to attend to it.

The mean query of a head, turned by the model's own RoPE to the positions of later queries and averaged, is a virtual
query w: <w, K> is the expected logit of a cached key K, times sqrt(D). What the queries scatter around their centre
adds sum over f of (a_f - |c_f|)+ |K_f|, so that a token is not lost because its queries point everywhere.

Source: TriAttention (Mao et al., arXiv 2604.04921) sections 3 and 4; TriAttention V3 (T. Turney), with the dims that
RoPE leaves alone counted too.
"""

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx
import numpy as np

from mlx_tq.errors import ConfigError
from mlx_tq.evict.expected import expected_attention
from mlx_tq.evict.policy import Body, PackedLayer, Policy
from mlx_tq.evict.queries import pooled_over_groups
from mlx_tq.evict.virtual import spread, virtual_query
from mlx_tq.kernels.score import score

BLOCK_TOKENS = 4096  # scored at a time


@dataclass(frozen=True)
class TriAttention(Policy):
    """Tokens that queries are expected to attend to stay."""

    name: ClassVar[str] = "triattention"
    needs_queries: ClassVar[bool] = True

    def score(self, body: Body) -> np.ndarray:
        """The expected logit of each token, aggregated over heads and layers as configured."""
        tokens = len(body.positions)
        total = np.zeros(tokens, np.float64)
        for layer in body.layers:
            total += self._of_layer(layer, tokens, body.length - 1)
        return total / len(body.layers)

    def _of_layer(self, layer: PackedLayer, tokens: int, last: int) -> np.ndarray:
        """[S]."""
        if layer.queries is None or layer.rope is None:
            raise ConfigError("triattention has no calibrated queries of a layer. Run the model inside attention().")
        heads = layer.rows.shape[1]
        stats = layer.queries
        if self.config.aggregation == "expected_attention":
            return expected_attention(layer, layer.rope, stats, tokens, last)
        if self.config.aggregation == "v3":
            stats = pooled_over_groups(stats, heads)
        query = virtual_query(layer.rope, stats.centre, last, nope=self.config.nope)
        query, weights = (x.reshape(heads, x.shape[0] // heads, x.shape[1]) for x in (query, spread(layer.rope, stats)))
        parts = []
        for start in range(0, tokens, BLOCK_TOKENS):
            block = layer.rows[:, :, start : min(start + BLOCK_TOKENS, tokens)]
            parts.append(score(block, block.shape[2], layer.layout, query, weights, layer.rope.pairs)[0])
            mx.eval(parts[-1])
        scores = mx.concatenate(parts, axis=-1)  # [H, G, S]
        if self.config.aggregation == "v3":
            return np.array(scores.sum(axis=(0, 1)), np.float64)
        deviation = mx.maximum(mx.std(scores, axis=-1, keepdims=True), 1e-12)
        normed = (scores - scores.mean(axis=-1, keepdims=True)) / deviation
        return np.array(normed.max(axis=1).mean(axis=0), np.float64)
