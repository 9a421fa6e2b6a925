"""`ShadowKVCache`: a compressed cache that runs beside mlx-lm's own, which attends; now and then both are compared.

So a format can be tried on one's own conversation before it is trusted with it: the answer is that of the model's own
cache, token by token.
"""

import copy
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from mlx_tq.cache.handles import Handle, StepView, check_seam, handles
from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.cache.links import SequencePart
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.kernels.regions import Mask


class ShadowKVCache(CompressedKVCache):
    """A layer whose tokens are compressed, and attended to uncompressed.

    Attributes:
        every: tokens from one comparison to the next; of passes of one token.
        notes: of each comparison, fp32 [2, Hq]: by query head the cosine between both attention outputs, and the KL
            divergence in nats of the weights on what the compressed cache stores from those on all tokens.
    """

    def __init__(self, spec: CacheSpec, number: int = 0, sequence: SequencePart | None = None) -> None:
        super().__init__(spec, number, sequence)
        self.every = 16
        self.notes: list[mx.array] = []
        self._own = KVCache()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Handle, Handle]:
        """Append keys and values to both caches; returns handles of the uncompressed ones."""
        check_seam()
        kept = self.append(keys, values)
        compares = keys.shape[2] == 1 and self.offset % self.every == 0
        all_keys, all_values = self._own.update_and_fetch(keys, values)
        view = ShadowView(kept, all_keys, all_values, self.notes, self.positions if compares else None)
        return handles(view, keys.dtype)

    def keys_and_values(self) -> tuple[Handle, Handle]:
        """Handles of what is stored uncompressed, for later layers that share it; these compare nothing."""
        kept: Any = super().keys_and_values()[0].view
        keys, values = self._own.keys_and_values()
        return handles(ShadowView(kept, keys, values, self.notes), keys.dtype)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """That of the uncompressed cache."""
        return self._own.make_mask(N, return_array=return_array, window_size=window_size)  # type: ignore[no-any-return]

    def trim(self, n: int) -> int:
        """Drop the last n tokens of both."""
        trimmed = super().trim(n)
        self._own.trim(trimmed)
        return trimmed

    def fork(self) -> "ShadowKVCache":
        """A copy of both; it compares for itself."""
        twin: Any = super().fork()
        twin.every, twin._own = self.every, copy.deepcopy(self._own)
        return twin  # type: ignore[no-any-return]

    def compressed(self) -> CompressedKVCache:
        """The compressed cache, for a pass that attends to it."""
        found: CompressedKVCache = CompressedKVCache.from_state(self.state)
        return found


@dataclass(frozen=True)
class ShadowView:
    """What tokens attend to, uncompressed, and the compressed view beside it.

    Attributes:
        kept: the compressed view.
        keys, values: uncompressed [B, H, S, D].
        notes: that a comparison is added to.
        positions: of the tokens that `kept` has, where both are to be compared.
    """

    kept: StepView
    keys: mx.array
    values: mx.array
    notes: list[mx.array]
    positions: np.ndarray | None = None

    def key_shape(self) -> tuple[int, ...]:
        """[B, H, S, Dk]."""
        return self.keys.shape

    def value_shape(self) -> tuple[int, ...]:
        """[B, H, S, Dv]."""
        return self.values.shape

    @property
    def wants_queries(self) -> bool:
        """The compressed cache has to see the queries of this step."""
        return self.kept.wants_queries

    def observed(self, queries: mx.array, rope: Any) -> "ShadowView":
        """The same view, once the compressed one has seen them."""
        return replace(self, kept=self.kept.observed(queries, rope))

    def materialize(self) -> tuple[mx.array, mx.array]:
        """Keys and values, which are arrays already."""
        return self.keys, self.values

    def attend(self, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None) -> mx.array:
        """Attention to the uncompressed tokens."""
        out = mx.fast.scaled_dot_product_attention(queries, self.keys, self.values, scale=scale, mask=mask, sinks=sinks)
        if self.positions is None:
            pending = self.kept.awaited(queries)
        else:
            other = self.kept.attend(queries, scale, None, sinks)
            divergence = self._divergence(queries, scale, self.positions)
            pending = [mx.stack([_cosine(out, other)[0, :, 0], divergence])]
            self.notes.extend(pending)
        return mx.depends(out, pending) if pending else out

    def _divergence(self, queries: mx.array, scale: float, positions: np.ndarray) -> mx.array:
        """Of the weights of queries [1, Hq, 1, Dk] on the stored tokens from those on all: [Hq]."""
        every = _weights(queries, self.keys, scale)
        kept = _weights(queries, self.kept.materialize()[0], scale)
        every = mx.take(every, mx.array(positions, mx.int32), axis=-1)
        return (mx.exp(kept) * (kept - every)).sum(axis=-1)


def _weights(queries: mx.array, keys: mx.array, scale: float) -> mx.array:
    """Logarithms of attention's weights: fp32 [Hq, S]."""
    heads, dim = keys.shape[1], keys.shape[3]
    grouped = queries.reshape(heads, -1, dim).astype(mx.float32)
    scores = scale * grouped @ keys[0].astype(mx.float32).swapaxes(-1, -2)
    scores = scores.reshape(-1, keys.shape[2])
    found: mx.array = scores - mx.logsumexp(scores, axis=-1, keepdims=True)
    return found


def _cosine(x: mx.array, y: mx.array) -> mx.array:
    """Along the last axis, in fp32; 1 where both are zero."""
    x, y = x.astype(mx.float32), y.astype(mx.float32)
    norms = mx.linalg.norm(x, axis=-1) * mx.linalg.norm(y, axis=-1)
    return mx.where(norms > 0, (x * y).sum(axis=-1) / mx.maximum(norms, 1e-30), 1.0)
