"""How the next token is chosen; requests with the same settings share a sampler, which mlx-lm calls once a batch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, greedy_sampler, make_logits_processors

from mlx_tq.server.errors import InvalidRequestError
from mlx_tq.server.schemas import Request

Sampler = Callable[[mx.array], mx.array]  # log-probabilities [B, V] -> tokens [B]

_MAX_TOKEN_ID_DIGITS = 10  # int() raises ValueError above 4,300 digits


@dataclass(frozen=True)
class Sampling:
    """Settings of a sampler; the defaults are the server's flags.

    Attributes:
        temperature: 0 takes the most likely token.
        top_p, top_k, min_p: which tokens may be taken at all; 1 (or 0), 0 and 0 let all.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def changed_by(self, request: Request) -> "Sampling":
        """These settings with those of a request."""
        names = ("temperature", "top_p", "top_k", "min_p")
        asked = {name: getattr(request, name) for name in names}
        return Sampling(**{name: getattr(self, name) if value is None else value for name, value in asked.items()})

    def sampler(self, vocabulary: int, seed: int | None = None) -> Sampler:
        """A sampler; with a seed one of its own, whose choices do not depend on what else is in the batch."""
        if self.temperature == 0:
            return greedy_sampler  # type: ignore[no-any-return]
        if seed is None:
            return _shared(self, vocabulary)
        return _Seeded(_filters(self, vocabulary), self.temperature, seed)


def _filters(sampling: Sampling, vocabulary: int) -> list[Sampler]:
    filters: list[Sampler] = []
    if 0 < sampling.top_p < 1:
        filters.append(partial(apply_top_p, top_p=sampling.top_p))
    if sampling.min_p > 0:
        filters.append(partial(apply_min_p, min_p=sampling.min_p))
    if 0 < sampling.top_k < vocabulary:
        filters.append(partial(apply_top_k, top_k=sampling.top_k))
    return filters


@lru_cache(maxsize=256)
def _shared(sampling: Sampling, vocabulary: int) -> Sampler:
    filters = _filters(sampling, vocabulary)
    return lambda logprobs: _draw(logprobs, filters, sampling.temperature, None)


class _Seeded:
    """A sampler with a key of its own."""

    def __init__(self, filters: list[Sampler], temperature: float, seed: int) -> None:
        self._filters, self._temperature, self._seed = filters, temperature, seed
        self._key: mx.array | None = None

    def __call__(self, logprobs: mx.array) -> mx.array:
        if self._key is None:  # not before: an array belongs to the thread that makes it
            self._key = mx.random.key(self._seed)
        self._key, key = mx.random.split(self._key)
        return _draw(logprobs, self._filters, self._temperature, key)


def _draw(logprobs: mx.array, filters: list[Sampler], temperature: float, key: mx.array | None) -> mx.array:
    for keep in filters:
        logprobs = keep(logprobs)
    return mx.random.categorical(logprobs * (1 / temperature), key=key)


def processors(request: Request, vocabulary: int) -> list[Any]:
    """mlx-lm's processors for the penalties and biases of a request.

    Raises:
        InvalidRequestError: a bias for a token that does not exist.
    """
    return list(
        make_logits_processors(
            _bias(request, vocabulary),
            repetition_penalty=request.repetition_penalty,
            repetition_context_size=request.repetition_context_size or 20,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
        )
    )


def _bias(request: Request, vocabulary: int) -> dict[int, float] | None:
    if not request.logit_bias:
        return None
    for token in request.logit_bias:
        is_number = token.isascii() and token.isdigit() and len(token) <= _MAX_TOKEN_ID_DIGITS
        if not (is_number and int(token) < vocabulary):
            raise InvalidRequestError(
                f"logit_bias names the token {token[:20]!r}; tokens are 0 to {vocabulary - 1}", "logit_bias"
            )
    return {int(token): bias for token, bias in request.logit_bias.items()}
