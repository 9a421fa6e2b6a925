"""Samplers and logits processors of requests, and guards that isolate their errors from the rest of the batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, greedy_sampler

from mlx_tq.cli.options import LOWEST_TEMPERATURE
from mlx_tq.cli.sampling_settings import make_processors
from mlx_tq.server.api_errors import InvalidRequestError
from mlx_tq.server.schemas import GenerationRequest

_LEAST_TOP_P = 1e-6

Sampler = Callable[[mx.array], mx.array]  # log-probabilities [B, V] -> tokens [B]


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling. Temperatures below `LOWEST_TEMPERATURE` are greedy; other defaults allow all tokens."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    repetition_context_size: int = 20
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def updated(self, request: GenerationRequest) -> "Sampling":
        """Return these settings with those that the request sets."""
        values = {setting.name: getattr(request, setting.name) for setting in fields(self)}
        return replace(self, **{name: value for name, value in values.items() if value is not None})

    def sampler(self, vocabulary: int, seed: int | None = None) -> Sampler:
        """Return a sampler. Requests with equal settings share one, which mlx-lm calls once per batch.

        A seeded sampler is not shared: its choices do not depend on the rest of the batch.
        """
        if self.temperature < LOWEST_TEMPERATURE:
            return greedy_sampler  # type: ignore[no-any-return]
        return _shared_sampler(self, vocabulary) if seed is None else _random_sampler(self, vocabulary, seed)


def _random_sampler(sampling: Sampling, vocabulary: int, seed: int | None = None) -> Sampler:
    filters: list[Sampler] = []
    if sampling.top_p < 1:  # mlx-lm takes 0 for all tokens, clients for the likeliest
        filters.append(partial(apply_top_p, top_p=max(sampling.top_p, _LEAST_TOP_P)))
    if sampling.min_p > 0:
        filters.append(partial(apply_min_p, min_p=sampling.min_p))
    if 0 < sampling.top_k < vocabulary:
        filters.append(partial(apply_top_k, top_k=sampling.top_k))
    next_key: mx.array | None = None

    def sample(logprobs: mx.array) -> mx.array:
        nonlocal next_key
        key = None
        if seed is not None:
            # The first key is not made earlier, because an array belongs to the thread that makes it.
            next_key, key = mx.random.split(mx.random.key(seed) if next_key is None else next_key)
        for apply_filter in filters:
            logprobs = apply_filter(logprobs)
        return mx.random.categorical(logprobs * (1 / sampling.temperature), key=key)

    return sample


_shared_sampler = lru_cache(maxsize=256)(_random_sampler)


def logits_processors(request: GenerationRequest, sampling: Sampling, vocabulary: int) -> list[Any]:
    """Return mlx-lm's processors for the penalties and biases of a request; refuse biases of unknown tokens."""
    for token in request.logit_bias or ():
        # int() raises ValueError above 4,300 digits.
        is_number = token.isascii() and token.isdigit() and len(token) <= 10
        if not (is_number and int(token) < vocabulary):
            message = f"logit_bias names the token {token[:20]!r}; tokens are 0 to {vocabulary - 1}"
            raise InvalidRequestError(message, "logit_bias")
    return make_processors(vars(sampling), {int(token): value for token, value in (request.logit_bias or {}).items()})


class ErrorGuard:
    """A sampler, or logits processors, whose errors do not reach the batch: `fallback` takes its place.

    `error` is the latest one. The row continues with harmless values until the engine, which reads it after each step,
    removes the job. An error that mlx raises on evaluation still ends the batch: nothing says which row caused it.
    """

    def __init__(self, function: Callable[..., mx.array], fallback: Callable[..., mx.array]) -> None:
        self._function, self._fallback = function, fallback
        self.error: Exception | None = None

    def __call__(self, *arrays: mx.array) -> mx.array:
        harmless = self._fallback(*arrays)  # first, because processors may write into the logits
        try:
            result = self._function(*arrays)
            if result.shape != harmless.shape:
                raise ValueError(f"it returned an array of the shape {result.shape} instead of {harmless.shape}")
        except Exception as error:  # noqa: BLE001 - the engine logs it
            self.error = error
            return harmless
        return result


def guard_processors(processors: Sequence[Any]) -> ErrorGuard:
    """Return one logits processor for all; it falls back to the logits [1, V] of the token after `tokens` [N]."""

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        for processor in processors:
            logits = processor(tokens, logits)
        return logits

    return ErrorGuard(process, lambda tokens, logits: logits[:])
