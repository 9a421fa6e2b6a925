"""Keep what one job's sampler or logits processors raise from the other rows of the batch.

The row of a job whose sampling fails goes on with harmless values until the engine, which reads `error` after each
step, takes it out of the batch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlx_tq.server.sampling import Sampler, is_shared


class _Guard:
    """Holds what was raised.

    Attributes:
        error: The exception, or None.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    def _compute(self, make: Callable[[], mx.array], source: mx.array, shape: Sequence[int], *, wait: bool) -> Any:
        """Return the array that `make` returns; None where it raises or returns an array of another shape.

        Args:
            make: Computes from `source`.
            source: What the model computed.
            shape: Of the array.
            wait: Evaluate the array, as mlx raises some errors only then.
        """
        try:
            made = make()
            if made.shape != tuple(shape):
                raise ValueError(f"it returned an array of the shape {made.shape} instead of {tuple(shape)}")
        except Exception as error:  # noqa: BLE001 - the engine logs it
            self.error = error
            return None
        if wait:
            mx.eval(source)  # what the model raises ends the batch
            try:
                mx.eval(made)
            except Exception as error:  # noqa: BLE001 - the engine logs it
                self.error = error
                return None
        return made


class GuardedProcessors(_Guard):
    """All logits processors of a job as one; after an error the logits stay as they are.

    Args:
        processors: Of mlx-lm.
    """

    def __init__(self, processors: Sequence[Any]) -> None:
        super().__init__()
        self._processors = processors

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Process the logits [1, V] of the token behind `tokens` [N]."""
        if self.error is not None:
            return logits
        unchanged = logits[:]  # processors may write into `logits`

        def process() -> mx.array:
            processed = logits
            for processor in self._processors:
                processed = processor(tokens, processed)
            return processed

        processed = self._compute(process, unchanged, unchanged.shape, wait=True)
        return unchanged if processed is None else processed


class GuardedSampler(_Guard):
    """A sampler that takes the most likely tokens where the sampler raises.

    mlx-lm samples all rows at once where they have one sampler, so the jobs that share a sampler share its guard.

    Args:
        sampler: Of mlx-lm.
    """

    def __init__(self, sampler: Sampler) -> None:
        super().__init__()
        self._sampler = sampler
        # Shared samplers consist of operations of mlx-lm that raise at once or never. Waiting for them would cost the
        # most usual requests the overlap of a step's computation with the preparation of the next one.
        self._waits = not is_shared(sampler)

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Sample tokens [B] from log-probabilities [B, V]."""
        tokens = self._compute(lambda: self._sampler(logprobs), logprobs, logprobs.shape[:-1], wait=self._waits)
        return mx.argmax(logprobs, axis=-1) if tokens is None else tokens
