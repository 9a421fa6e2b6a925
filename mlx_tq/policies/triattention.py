"""The policy `triattention`: a token's score is the attention that queries to come are expected to give to it.

The mean query of a head, turned by the model's own RoPE to the positions of later queries and averaged, is a virtual
query w: <w, K> is the expected logit of a cached key K, times sqrt(D). What the queries scatter around their centre
adds sum over f of (a_f - |c_f|)+ |K_f|, so that a token is not lost because its queries point everywhere.

Source: TriAttention (Mao et al., arXiv 2604.04921) sections 3 and 4; TriAttention V3 (T. Turney); heads and layers are
brought together as by Expected Attention (Devoto et al., kvpress). The dims that RoPE leaves alone can be counted too;
a question looks there for what the mean of other queries does not point to.
"""

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx
import numpy as np

from mlx_tq.kernels.score import score
from mlx_tq.policies.options import names_settings, option
from mlx_tq.policies.policy import Body, CalibratedPolicy, PackedLayer
from mlx_tq.policies.queries import pooled_over_groups
from mlx_tq.policies.virtual_query import spread, virtual_query
from mlx_tq.policies.weighing import weighed

BLOCK_TOKENS = 4096  # scored at a time


@names_settings
@dataclass(frozen=True, kw_only=True)
class TriAttention(CalibratedPolicy):
    """Tokens that queries are expected to attend to stay.

    Attributes:
        evict: "lowest" scores leave, or "highest": the sign of published ports, for comparison only.
        aggregation: of scores over heads and layers. "weight": the weight of attention that the scores make, times the
            norm of the value, the mean over query heads and layers. "paper": of unit deviation in each query head, the
            maximum over the query heads of a KV head, the mean over KV heads and layers. "v3": one mean query for each
            KV head, the sum over KV heads, the mean over layers.
        score_unrotated_dims: whether the dims that RoPE leaves alone count, where a model has such.
        skip_layers: first compressed layers that take no part in scoring (the published boundary skip).
    """

    name: ClassVar[str] = "triattention"

    evict: str = option("lowest", choices=("lowest", "highest"))
    aggregation: str = option("weight", choices=("weight", "paper", "v3"))
    score_unrotated_dims: bool = False
    skip_layers: int = option(0, least=0)

    @property
    def least_layers(self) -> int:
        """One more than are skipped."""
        return self.skip_layers + 1

    def score(self, body: Body) -> np.ndarray:
        """The expected logit of each token, aggregated over heads and layers as configured."""
        layers = body.layers[self.skip_layers :]
        total = np.zeros(len(body.positions), np.float64)
        for layer in layers:
            total += self._of_layer(layer, len(total), body.length - 1)
        return (-total if self.evict == "highest" else total) / len(layers)

    def _of_layer(self, layer: PackedLayer, tokens: int, last: int) -> np.ndarray:
        """The scores of the first `tokens` rows of a layer, aggregated over heads: float64 [S]."""
        rope, stats = self.calibration_of(layer)
        heads = layer.rows.shape[1]
        if self.aggregation == "v3":
            stats = pooled_over_groups(stats, heads)
        query = virtual_query(rope, stats.centre, last, unrotated=self.score_unrotated_dims)
        query, weights = (x.reshape(heads, x.shape[0] // heads, x.shape[1]) for x in (query, spread(rope, stats)))
        parts, norms = [], []
        for start in range(0, tokens, BLOCK_TOKENS):
            block = layer.part(start, min(start + BLOCK_TOKENS, tokens))
            found = score(
                block.rows, block.rows.shape[2], layer.layout, query, weights, rope.pairs, block.normalization
            )
            parts.append(found[0])
            norms.append(block.value_norms())  # not computed unless they count
            mx.eval(parts[-1])
        scores = mx.concatenate(parts, axis=-1)  # [H, G, S]
        if self.aggregation == "weight":
            return weighed(scores / layer.layout.key.head_dim**0.5, mx.concatenate(norms, axis=-1))
        if self.aggregation == "v3":
            return np.array(scores.sum(axis=(0, 1)), np.float64)
        deviation = mx.maximum(mx.std(scores, axis=-1, keepdims=True), 1e-12)
        normed = (scores - scores.mean(axis=-1, keepdims=True)) / deviation
        return np.array(normed.max(axis=1).mean(axis=0), np.float64)
