"""A conversation in the shadow: the model's own cache answers; what a compressed one would have changed is reported."""

import copy
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import CacheList

from mlx_tq.cache.shadow import ShadowKVCache
from mlx_tq.config import KVConfig
from mlx_tq.errors import CacheFormatError, ConfigError
from mlx_tq.prompt_cache.build import build_caches
from mlx_tq.prompt_cache.compressed import compressed
from mlx_tq.prompt_cache.passes import cache_parts
from mlx_tq.prompt_cache.plan import Plan

EVERY = 16
WORST = 5


@dataclass(frozen=True)
class ShadowLayer:
    """What a layer's compressed cache would have changed, over all comparisons and query heads.

    Attributes:
        index: of the layer.
        cosine, least_cosine: between both attention outputs: the mean and the least.
        kld, most_kld: in nats, of the weights on what is stored from those on all tokens: the mean and the most.
    """

    index: int
    cosine: float
    least_cosine: float
    kld: float
    most_kld: float


@dataclass(frozen=True)
class ShadowToken:
    """What a pass over the compressed cache would have predicted for one token.

    Attributes:
        position: of the token.
        text: the one that was generated.
        kld: divergence in nats of its prediction from that of the model's own cache.
        same: both name the same most likely token.
    """

    position: int
    text: str
    kld: float
    same: bool


@dataclass(frozen=True)
class ShadowReport:
    """Of one conversation.

    Attributes:
        layers: compared, each in as many places as `comparisons`.
        comparisons: passes in which attention was compared.
        packed: tokens that the compressed cache held packed at last; where there are none, nothing was compressed.
        tokens: whose prediction was compared; none where the model has a cache that cannot be trimmed.
    """

    layers: list[ShadowLayer]
    comparisons: int
    packed: int
    tokens: list[ShadowToken]

    @property
    def kld(self) -> float | None:
        """Mean divergence of predictions in nats."""
        return float(np.mean([token.kld for token in self.tokens])) if self.tokens else None

    @property
    def top1(self) -> float | None:
        """How often both name the same token, in percent."""
        return 100 * float(np.mean([token.same for token in self.tokens])) if self.tokens else None

    @property
    def worst(self) -> list[ShadowToken]:
        """The tokens whose predictions differ most, first the worst."""
        return sorted(self.tokens, key=lambda token: -token.kld)[:WORST]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**asdict(self), "kld": self.kld, "top1": self.top1}


class Shadow:
    """Runs compressed caches beside the model's own ones, and compares them every few tokens.

    Args:
        model: of mlx-lm.
        plan: of the compressed caches.
        every: tokens from one comparison to the next.

    Attributes:
        caches: for the conversation.

    Raises:
        ConfigError: `every` is no whole number above 0, or older keys have a format of their own, or what left would
            come back, which would not be what the model's own cache holds.
    """

    def __init__(self, model: Any, plan: Plan, every: int = EVERY) -> None:
        if every < 1:
            raise ConfigError(f"a shadow compares every {every} tokens; it must be 1 or more, such as {EVERY}.")
        if any(layer.spec.cold for layer in plan.layers):
            raise ConfigError("a shadow needs one format of keys for all tokens, such as tq4. Drop the second.")
        if plan.recalls:
            raise ConfigError("a shadow cannot recall: its answers are those of the whole cache. Add --kv-recall off.")
        self._model, self._every = model, every
        self.caches = build_caches(plan, shadow=True)
        shadows = [part for part in cache_parts(self.caches) if isinstance(part, ShadowKVCache)]
        self._layers = {layer.slot.index: cache for layer, cache in zip(plan.layers, shadows, strict=True)}
        for cache in shadows:
            cache.every = every
        self._tokens: list[ShadowToken] = []
        self._last, self._position = 0, 0

    def begin(self, last: int, position: int) -> None:
        """An answer begins: the last token of its prompt, and that token's position."""
        self._last, self._position = last, position

    def token(self, token: int, text: str, log_probabilities: mx.array) -> None:
        """The answer has one more token, drawn from log-probabilities [V]; every few tokens they are compared."""
        last, position = self._last, self._position
        self._last, self._position = token, position + 1
        if self._position % self._every:
            return
        caches = self._compressed_until(position)
        if caches is None:
            return
        with compressed(self._model):
            logits = self._model(mx.array([[last]]), cache=caches)[0, -1].astype(mx.float32)
        found = logits - mx.logsumexp(logits)
        own = log_probabilities.astype(mx.float32)
        divergence = (mx.exp(own) * (own - found)).sum()
        same = own.argmax() == found.argmax()
        self._tokens.append(ShadowToken(position + 1, text, float(divergence), bool(same)))

    def _compressed_until(self, length: int) -> list[Any] | None:
        """Compressed caches of the tokens before position `length`; None where a cache cannot go back to it."""
        found = []
        for cache in self.caches:
            parts = [self._before(part, length) for part in cache_parts([cache])]
            if any(part is None for part in parts):
                return None
            found.append(type(cache)(*parts) if isinstance(cache, CacheList) else parts[0])
        return found

    def _before(self, part: Any, length: int) -> Any | None:
        twin = part.compressed() if isinstance(part, ShadowKVCache) else copy.deepcopy(part)
        if not twin.is_trimmable():
            return None
        with suppress(CacheFormatError):  # a round came in between
            twin.trim(twin.offset - length)
        return twin if twin.offset == length else None

    def report(self) -> ShadowReport:
        """What was found until now. Waits for the arrays."""
        layers, comparisons = [], 0
        for index, cache in self._layers.items():
            if cache.notes:
                cosine, kld = np.array(mx.stack(cache.notes)).transpose(1, 0, 2)
                comparisons = len(cache.notes)
                found = (cosine.mean(), cosine.min(), kld.mean(), kld.max())
                layers.append(ShadowLayer(index, *map(float, found)))
        packed = min(cache.body_tokens for cache in self._layers.values())
        return ShadowReport(layers, comparisons, packed, list(self._tokens))


def chosen_shadow(model: Any, plan: Plan | None, every: int | None, *, stores: bool) -> Shadow | None:
    """The shadow of a conversation, if one is asked for.

    Raises:
        ConfigError: as `Shadow`; nothing is compressed, or prompts are stored.
    """
    if every is None:
        return None
    if plan is None or stores:
        why = "nothing is compressed: choose a profile or formats" if plan is None else "a store is asked for: drop it"
        raise ConfigError(f"a shadow needs a compressed cache that reads all of a prompt, and {why}.")
    return Shadow(model, plan, every)


def shadowed(config: KVConfig, every: int | None) -> KVConfig:
    """The configuration of a conversation with a shadow every so many tokens, or with none: recall that is auto is off.

    The answers are those of the whole cache, and nothing has left that.
    """
    if every is None or config.evict is None or config.evict.recall != "auto":
        return config
    return replace(config, evict=replace(config.evict, recall="off"))


def refuse_files(shadow: Shadow | None) -> None:
    """Raise where a conversation in the shadow would be saved or loaded.

    Raises:
        ConfigError: there is a shadow.
    """
    if shadow is not None:
        raise ConfigError("a conversation with --kv-shadow cannot be saved or loaded. Start again without it.")
