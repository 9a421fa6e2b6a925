"""What a layer knows of the sequence that it belongs to.

A layer may be copied, saved or put into a batch by itself, as mlx-lm does. Each copy and file carries its part of the
sequence along, and the next forward pass puts the parts together again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from mlx_tq.errors import CacheFormatError


class Observer(Protocol):
    """Wants to see the queries of one pass, as they were before RoPE."""

    @property
    def due(self) -> bool:
        """It has not seen those of this pass."""
        ...

    def observe(self, queries: mx.array, rope: Any) -> list[mx.array]:
        """Take in queries [1, Hq, L, D] that `rope` turns; returns arrays to be computed with the pass."""
        ...


# Told the queries [1, Hq, L, Dk] that attention is asked with, after RoPE, and the scale of its scores.
Hear = Callable[[mx.array, float], None]


class SequencePart(Protocol):
    """The sequence as one of its layers sees it; see `sequence.sequence.Sequence`."""

    def admit(self, stop: int) -> None:
        """Raise unless a forward pass up to position `stop` was announced."""
        ...

    def rewind(self, layer: Any, length: int) -> bool:
        """A layer, a `CompressedKVCache`, is about to be trimmed; returns whether it has all its window then needs."""
        ...

    def observer(self, number: int, start: int, stop: int) -> Observer | None:
        """What wants to see the queries of layer `number` at positions [start, stop), or None."""
        ...

    def listener(self, number: int) -> Hear | None:
        """What hears the queries of layer `number`, or None."""
        ...

    def part(self, number: int) -> "SequencePart":
        """What a copy of layer `number` takes along."""
        ...

    def part_state(self, number: int) -> tuple[Any, ...]:
        """The same as arrays and text, for files."""
        ...


@dataclass(frozen=True)
class SavedPart:
    """A part from a file, before a forward pass has made a sequence of it.

    Attributes:
        state: of `SequencePart.part_state`.
    """

    state: tuple[Any, ...]

    def admit(self, stop: int) -> None:
        """Raise: no pass was announced to it.

        Raises:
            CacheFormatError: always.
        """
        raise went_around()

    def rewind(self, layer: Any, length: int) -> bool:
        """Always False: a saved part has no archive."""
        return False

    def observer(self, number: int, start: int, stop: int) -> Observer | None:
        """Always None: a saved part asks for nothing."""
        return None

    def listener(self, number: int) -> Hear | None:
        """Always None, likewise."""
        return None

    def part(self, number: int) -> "SavedPart":
        """The part itself, which never changes."""
        return self

    def part_state(self, number: int) -> tuple[Any, ...]:
        """The state from the file."""
        return self.state


def went_around() -> CacheFormatError:
    """The error of a forward pass that no sequence was told of."""
    return CacheFormatError(
        "a forward pass wrote to a cache that evicts without having been announced to it, so no round could come "
        "before it. Call the model itself, not one of its parts, inside `with mlx_tq.compressed(model):`."
    )
