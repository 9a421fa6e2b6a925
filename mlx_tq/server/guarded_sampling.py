"""Isolate errors of one job's sampler and logits processors from the rest of the batch.

After an error, the row continues with harmless values until the engine, which reads `error` after each step, removes
the job. An error that mlx raises on evaluation still ends the batch, because nothing says which row caused it.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_tq.server.sampling import Sampler


class GuardedProcessors:
    """Run a job's logits processors; after an error, return the logits unchanged.

    Args:
        processors: of mlx-lm.

    Attributes:
        error: what was raised, or None.
    """

    def __init__(self, processors: Sequence[Any]) -> None:
        self._processors = processors
        self.error: Exception | None = None

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Process the logits [1, V] of the token behind `tokens` [N]."""
        if self.error is not None:
            return logits
        unchanged = logits[:]  # processors may write into `logits`
        processed = logits
        try:
            for processor in self._processors:
                processed = processor(tokens, processed)
            _check_shape(processed, unchanged.shape)
        except Exception as error:  # noqa: BLE001 - the engine logs it
            self.error = error
            return unchanged
        return processed


class GuardedSampler:
    """A sampler that falls back to argmax if the wrapped sampler raises.

    mlx-lm samples all rows at once where they have one sampler, so the jobs that share a sampler share its guard.

    Args:
        sampler: of mlx-lm.

    Attributes:
        error: what was raised since the engine cleared it, or None.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.error: Exception | None = None

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Sample tokens [B] from log-probabilities [B, V]."""
        try:
            tokens = self._sampler(logprobs)
            _check_shape(tokens, logprobs.shape[:-1])
        except Exception as error:  # noqa: BLE001 - the engine logs it
            self.error = error
            return mx.argmax(logprobs, axis=-1)
        return tokens


def _check_shape(array: mx.array, expected: tuple[int, ...]) -> None:
    if array.shape != expected:
        raise ValueError(f"it returned an array of the shape {array.shape} instead of {expected}")
