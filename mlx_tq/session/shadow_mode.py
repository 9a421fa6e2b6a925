"""Shadow mode: the model's own cache answers, and what a compressed cache would have changed is reported."""

import copy
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import CacheList

from mlx_tq.cache.layer import cache_parts
from mlx_tq.cache.shadow import ShadowKVCache
from mlx_tq.errors import CacheFormatError, ConfigError
from mlx_tq.prompt_cache.build import build_caches
from mlx_tq.prompt_cache.compressed import compressed_attention
from mlx_tq.prompt_cache.measurements import kl_divergence, log_probabilities
from mlx_tq.prompt_cache.plan import Plan


@dataclass(frozen=True)
class ShadowLayer:
    """Errors of one layer's attention over all comparisons and query heads."""

    index: int
    cosine: float  # similarity of the attention outputs, mean and minimum
    least_cosine: float
    kld: float  # divergence of the attention weights in nats, mean and maximum
    most_kld: float


@dataclass(frozen=True)
class ShadowToken:
    """Both predictions of one token."""

    position: int
    text: str
    kld: float  # divergence in nats from the prediction with the model's own cache
    same: bool  # both predict the same most likely token


@dataclass(frozen=True)
class ShadowReport:
    """The changes that a compressed cache would have made to one conversation."""

    layers: list[ShadowLayer]
    comparisons: int  # forward passes in which attention was compared
    packed: int  # tokens that were packed at the end; if 0, nothing was compressed
    tokens: list[ShadowToken]  # empty for a model whose caches cannot be trimmed

    @property
    def kld(self) -> float | None:
        """Mean KL divergence of the predictions in nats."""
        return float(np.mean([token.kld for token in self.tokens])) if self.tokens else None

    @property
    def top1(self) -> float | None:
        return 100 * float(np.mean([token.same for token in self.tokens])) if self.tokens else None

    @property
    def worst(self) -> list[ShadowToken]:
        return sorted(self.tokens, key=lambda token: -token.kld)[:5]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "kld": self.kld, "top1": self.top1}


class Shadow:
    """Compressed caches that run next to the model's own; `caches` has both. They are compared every few tokens."""

    def __init__(self, model: Any, plan: Plan, every: int) -> None:
        if every < 1:
            raise ConfigError(f"a shadow compares every {every} tokens; it must be 1 or more, such as 16.")
        if any(layer.spec.cold for layer in plan.layers):
            raise ConfigError("a shadow needs one format of keys for all tokens, such as tq4. Drop the second.")
        if plan.recalls:
            raise ConfigError("a shadow cannot recall: its answers are those of the whole cache. Add --kv-recall off.")
        self._model, self._every, self.native_dtype = model, every, plan.native_dtype
        self.caches = build_caches(plan, shadow=True)
        shadows = [part for part in cache_parts(self.caches) if isinstance(part, ShadowKVCache)]
        self._layers = {layer.slot.index: cache for layer, cache in zip(plan.layers, shadows, strict=True)}
        for cache in shadows:
            cache.every = every
        self._tokens: list[ShadowToken] = []
        self._last_token, self._position = 0, 0

    def begin(self, last_token: int, position: int) -> None:
        """Begin an answer, given the last token of its prompt and that token's position."""
        self._last_token, self._position = last_token, position

    def token(self, token: int, text: str, logprobs: mx.array) -> None:
        """Take one token of the answer, drawn from log-probabilities [V], and compare if it is time."""
        last_token, position = self._last_token, self._position
        self._last_token, self._position = token, position + 1
        if self._position % self._every or (caches := self._compressed_until(position)) is None:
            return
        with compressed_attention(self._model):
            predicted = log_probabilities(self._model, [last_token], caches)[0]
        expected = logprobs.astype(mx.float32)
        same = expected.argmax() == predicted.argmax()
        self._tokens.append(ShadowToken(position + 1, text, float(kl_divergence(expected, predicted)), bool(same)))

    def _compressed_until(self, length: int) -> list[Any] | None:
        """Return compressed caches of the first `length` tokens; None if a cache cannot be trimmed to them."""
        caches = []
        for cache in self.caches:
            parts = []
            for part in cache_parts([cache]):
                trimmed = part.compressed() if isinstance(part, ShadowKVCache) else copy.deepcopy(part)
                if trimmed.is_trimmable():
                    with suppress(CacheFormatError):  # an eviction round came in between
                        trimmed.trim(trimmed.offset - length)
                if not trimmed.is_trimmable() or trimmed.offset != length:
                    return None
                parts.append(trimmed)
            caches.append(type(cache)(*parts) if isinstance(cache, CacheList) else parts[0])
        return caches

    def report(self) -> ShadowReport:
        """Return the comparisons so far. Waits for their arrays."""
        layers, comparisons = [], max(len(cache.notes) for cache in self._layers.values())
        for index, cache in self._layers.items():
            if cache.notes:
                cosine, kld = np.array(mx.stack(cache.notes)).transpose(1, 0, 2)
                layers.append(ShadowLayer(index, *map(float, (cosine.mean(), cosine.min(), kld.mean(), kld.max()))))
        packed = min(cache.packed_tokens for cache in self._layers.values())
        return ShadowReport(layers, comparisons, packed, list(self._tokens))


def make_shadow(model: Any, plan: Plan | None, every: int | None, *, has_prefix_cache: bool) -> Shadow | None:
    """Return the shadow of a session, or None if `every` is None; raise a ConfigError if it cannot be made."""
    if every is None:
        return None
    if plan is None or has_prefix_cache:
        why = "nothing is compressed: choose a profile or formats" if plan is None else "a prefix cache is on: drop it"
        raise ConfigError(f"a shadow needs a compressed cache and prefills all of a prompt, and {why}.")
    return Shadow(model, plan, every)
