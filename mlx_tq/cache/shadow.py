"""`ShadowKVCache`: a compressed cache that runs next to mlx-lm's own, which attends; now and then both are compared.

So a format can be tried on one's own conversation before it is trusted: the answer is that of the model's own cache,
token by token.
"""

import copy
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from mlx_tq.cache.layer import CompressedKVCache, Group
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.cache.view import Handle, StepView, check_attention_is_patched, make_handles
from mlx_tq.kernels.mlx_attention import attention
from mlx_tq.kernels.regions import Mask, apply_mask


class ShadowKVCache(CompressedKVCache):
    """A layer whose tokens are compressed, but attended to uncompressed.

    Attributes:
        every: tokens between two comparisons, which passes of one token make.
        notes: of each comparison, fp32 [2, Hq]: by query head the cosine between both attention outputs, and the KL
            divergence, in nats, between the weights on what the compressed cache stores and those on all tokens.
    """

    def __init__(self, spec: CacheSpec, number: int = 0, group: Group | None = None) -> None:
        super().__init__(spec, number, group)
        self.every = 16
        self.notes: list[mx.array] = []
        self._native = KVCache()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Handle, Handle]:
        """Append keys and values to both caches; return handles of the uncompressed ones."""
        check_attention_is_patched()
        compressed = self.append(keys, values)
        compares = keys.shape[2] == 1 and self.offset % self.every == 0
        all_keys, all_values = self._native.update_and_fetch(keys, values)
        view = ShadowView(compressed, all_keys, all_values, self.notes, self.regions.positions if compares else None)
        return make_handles(view, keys.dtype)

    def keys_and_values(self) -> tuple[Handle, Handle]:
        """Return handles of the uncompressed tokens, for later layers that share them; these compare nothing."""
        compressed: Any = super().keys_and_values()[0].view
        keys, values = self._native.keys_and_values()
        return make_handles(ShadowView(compressed, keys, values, self.notes), keys.dtype)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        return self._native.make_mask(N, return_array=return_array, window_size=window_size)  # type: ignore[no-any-return]

    def trim(self, n: int) -> int:
        trimmed = super().trim(n)
        self._native.trim(trimmed)
        return trimmed

    def fork(self) -> "ShadowKVCache":
        twin: Any = super().fork()
        twin.notes, twin._native = [], copy.deepcopy(self._native)
        return twin  # type: ignore[no-any-return]

    def compressed(self) -> CompressedKVCache:
        """Return the compressed cache, for a pass that attends to it."""
        return CompressedKVCache.from_state(self.state)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class ShadowView:
    """Uncompressed keys and values, which tokens attend to, and the compressed view of the same tokens."""

    compressed: StepView
    keys: mx.array  # [B, H, S, Dk]
    values: mx.array  # [B, H, S, Dv]
    notes: list[mx.array]  # that a comparison is added to
    positions: np.ndarray | None = None  # of the tokens in `compressed`, if both are to be compared

    def key_shape(self) -> tuple[int, ...]:
        return self.keys.shape

    def value_shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def wants_queries(self) -> bool:
        return self.compressed.wants_queries

    def notify_before_rope(self, queries: mx.array, rope: Any) -> "ShadowView":
        return replace(self, compressed=self.compressed.notify_before_rope(queries, rope))

    def materialize(self) -> tuple[mx.array, mx.array]:
        return self.keys, self.values

    def attend(self, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None) -> mx.array:
        out = attention(queries, self.keys, self.values, scale=scale, mask=mask, sinks=sinks)
        if self.positions is None:
            pending = self.compressed.notify(queries, scale, sinks)
        else:
            index = mx.array(self.positions, mx.int32)
            stored_mask = mx.take(mask, index, axis=-1) if isinstance(mask, mx.array) else None
            other = self.compressed.attend(queries, scale, stored_mask, sinks)
            exact, stored = (
                _log_weights(queries, keys, scale, selected)
                for keys, selected in ((self.keys, mask), (self.compressed.materialize()[0], stored_mask))
            )
            divergence = (mx.exp(stored) * (stored - mx.take(exact, index, axis=-1))).sum(axis=-1)
            pending = [mx.stack([_cosine(out, other)[0, :, 0], divergence])]
            self.notes.extend(pending)
        return mx.depends(out, pending) if pending else out


def _log_weights(queries: mx.array, keys: mx.array, scale: float, mask: Mask) -> mx.array:
    """Return the logarithms of attention's weights, fp32 [Hq, S]."""
    heads, dim = keys.shape[1], keys.shape[3]
    grouped = queries.reshape(1, heads, -1, dim).astype(mx.float32)
    scores = scale * grouped @ keys.astype(mx.float32).swapaxes(-1, -2)
    scores = apply_mask(scores, mask, 1) if isinstance(mask, mx.array) else scores
    scores = scores.reshape(-1, keys.shape[2])
    return scores - mx.logsumexp(scores, axis=-1, keepdims=True)


def _cosine(x: mx.array, y: mx.array) -> mx.array:
    """Return the cosine along the last axis, in fp32; 1 where both are zero."""
    x, y = x.astype(mx.float32), y.astype(mx.float32)
    norms = mx.linalg.norm(x, axis=-1) * mx.linalg.norm(y, axis=-1)
    return mx.where(norms > 0, (x * y).sum(axis=-1) / mx.maximum(norms, 1e-30), 1.0)
