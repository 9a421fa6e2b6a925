"""Looks into the archive while an answer is made, so that what the answer itself turns out to need comes too."""

import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mlx_tq.prompt_cache.archive import Extent
from mlx_tq.prompt_cache.layer_group import LayerGroup
from mlx_tq.prompt_cache.passes import sequence_in, sequence_layers
from mlx_tq.prompt_cache.recall import LONGEST_QUESTION, Scored, deciding, looking, positions_of, weighed
from mlx_tq.rescue.wire import Range
from mlx_tq.session.recall import Recalled

# Archived tokens that all layers may weigh for each token of an answer: a look is then a twentieth of the steps before
# it (docs/measurements/eviction.md). Counted, not timed: an answer must not depend on how busy the machine is.
_WEIGHED = 25


class Looks:
    """The looks of one answer. What is back is what the latest look found best, beside what stays; none after the end.

    Attributes:
        positions: that came back by looks, in the order in which they came.
        count: looks so far.
        seconds: that they took.
    """

    def __init__(self, caches: list[Any], recalled: Recalled, quoted: Sequence[Range] = ()) -> None:
        """None yet, before `begin`.

        Args:
            caches: of the conversation, in whose list the store may put others until then.
            recalled: for the question. What a search named stays, and the layers that decided its best blocks look;
                where nothing was archived yet, all that look for a question.
            quoted: positions [start, stop) that came back as text; a block in one of them need not come as rows too.
        """
        self._caches, self._recalled, self._quoted = caches, recalled, quoted
        self._since, self._next = 0, 0
        self.positions: list[int] = []
        self.count, self.seconds = 0, 0.0
        self._sequence: LayerGroup | None = None
        self._numbers: Collection[int] = ()  # of the layers that look
        self._ranked: Sequence[Scored] = recalled.ranked  # by the latest look

    def begin(self) -> None:
        """Listen to the caches, which are about to read the question; rounds go on meanwhile."""
        sequence = sequence_in(self._caches)
        if sequence is not None and sequence.plan.config.recalls:
            self._sequence = sequence
            self._numbers = deciding(self._recalled.ranked) or looking(len(sequence_layers(self._caches)))
            sequence.listen(self._numbers, rounds=True)
            self._next = self._wait(sequence)

    def token(self) -> None:
        """The answer has one token more."""
        self._since += 1
        if self._sequence is not None and self._since >= self._next and self._sequence.archived:
            self._look(self._sequence)

    def end(self) -> None:
        """Listen no more."""
        if self._sequence is not None:
            self._sequence.listen([], rounds=True)

    def brought(self) -> Recalled:
        """What the question brought back and what the looks did; the archive as the latest found it."""
        found = self._recalled
        queries, seconds = tuple(sorted({*found.queries, *self.positions})), found.seconds + self.seconds
        return replace(found, queries=queries, ranked=tuple(self._ranked), seconds=seconds)

    def _wait(self, sequence: LayerGroup) -> int:
        """Tokens until the next look; all ranks look at once."""
        layers, archived = sequence_layers(self._caches), len(positions_of(sequence.archived))
        tokens = weighed(archived, self._numbers, sequence.plan.recall_tokens(layers[0].offset))
        waits = sequence.ranks.max(np.array([tokens / len(layers) / _WEIGHED]))
        return max(sequence.plan.config.recall_every, int(waits[0]))

    def _look(self, sequence: LayerGroup) -> None:
        began = time.perf_counter()
        layers = sequence_layers(self._caches)
        spec, seen = layers[0].spec, layers[0].offset
        latest = min(sequence.plan.config.recall_every, LONGEST_QUESTION)
        asking = max(1, min(latest, spec.window))  # all of them are in the window
        self._ranked, found = sequence.look(layers, asking, sequence.plan.recall_tokens(seen), back=True)
        wanted = dict.fromkeys([*self._recalled.named, *(extent for extent in found if not self._is_quoted(extent))])
        self.positions += sequence.exchange(layers, list(wanted)).tolist()
        self.count, self.seconds = self.count + 1, self.seconds + time.perf_counter() - began
        self._next, self._since = self._wait(sequence), 0

    def _is_quoted(self, extent: Extent) -> bool:
        first, last = extent.positions[0], extent.positions[-1]
        return any(start <= first and last < stop for start, stop in self._quoted)
