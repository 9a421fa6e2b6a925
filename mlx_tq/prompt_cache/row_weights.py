"""How much a model needs each row of a text: the largest attention weight while the model repeats that text.

Source: KVzip (Kim et al., arXiv 2505.23416).
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_tq.errors import ConfigError
from mlx_tq.integration.probe import position_limit

_INSTRUCTION = "\n\nRepeat the previous context exactly.\n\n"


def repetition(model: Any, tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """Return the instruction to repeat a text, and the text; raise ConfigError if they exceed the model's positions."""
    repeated = [*tokenizer.encode(_INSTRUCTION, add_special_tokens=False), *ids]
    limit = position_limit(model)
    if limit is not None and len(ids) + len(repeated) > limit:
        raise ConfigError(
            f"to read {len(ids):,} tokens and repeat them takes {len(ids) + len(repeated):,} positions, and the model "
            f"allows {limit:,}. Use a shorter text."
        )
    return repeated


def row_weights(queries: mx.array, keys: mx.array, scale: float, sinks: mx.array | None = None) -> mx.array:
    """Return the largest weight of each key, over the queries and the query heads of a KV head: fp32 [H, S].

    Args:
        queries: [1, Hq, L, D], of the last L of the tokens.
        keys: [1, H, S, D].
        scale: factor of scores.
        sinks: attention-sink logits [Hq].
    """
    heads, total, dim = keys.shape[1:]
    length = queries.shape[2]
    visible = mx.arange(total) <= mx.arange(total - length, total)[:, None]
    groups = queries[0].astype(mx.float32).reshape(heads, -1, length, dim) * scale
    logits = None if sinks is None else sinks.astype(mx.float32).reshape(heads, -1)
    weights: list[mx.array] = []
    for head in range(heads):
        # One after another: the scores of all heads would otherwise be in memory at once.
        scores = mx.depends(groups[head], weights[-1:]) @ keys[0, head].astype(mx.float32).T
        scores = mx.where(visible, scores, -mx.inf)
        sums = mx.logsumexp(scores, axis=-1, keepdims=True)
        if logits is not None:
            sums = mx.logaddexp(sums, logits[head][:, None, None])
        weights.append(mx.exp(scores - sums).max(axis=(0, 1)))
    return mx.stack(weights)
