"""Recall: what a question asks for comes back from the archive before it is read."""

import copy
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream

from mlx_tq.prompt_cache.archive import Extent
from mlx_tq.prompt_cache.compressed import compressed
from mlx_tq.prompt_cache.passes import compressed_caches, sequence_in, sequence_layers
from mlx_tq.prompt_cache.recall import LONGEST_QUESTION, Scored, holding, looking, positions_of
from mlx_tq.rescue.wire import Range

# Tokens at the end of a prompt that are its question, at least.
SHORTEST_QUESTION = 32
# What a paragraph begins behind, and tokens in which it is looked for.
_EMPTY_LINE, _EMPTY_LINE_TOKENS = re.compile(r"\n\s*\n[^\S\n]*$"), 6


@dataclass(frozen=True)
class Named:
    """Where the rescue service's search points: what a question means, whatever its words.

    Attributes:
        ranges: of positions [start, stop), best first.
        limit: tokens that may come back for them.
    """

    ranges: tuple[Range, ...] = ()
    limit: int = 0


NOWHERE = Named()


@dataclass(frozen=True)
class Recalled:
    """What a question brought back.

    Attributes:
        queries: positions that are back because the model's own queries found them, ascending.
        meaning: those that the rescue service's search named, ascending; some may be both.
        ranked: the archived blocks, best first.
        named: the blocks that were named; they stay until the answer is complete.
        seconds: which that took, the reading of the question over a copy among them, and looks while answering.
    """

    queries: tuple[int, ...] = ()
    meaning: tuple[int, ...] = ()
    ranked: tuple[Scored, ...] = ()
    named: tuple[Extent, ...] = ()
    seconds: float = 0.0

    @property
    def positions(self) -> list[int]:
        """All that are back, ascending."""
        return sorted({*self.queries, *self.meaning})

    @property
    def archived(self) -> int:
        """Tokens in the archive, those that came back among them."""
        return sum(len(piece.extent.positions) for piece in self.ranked)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        by = {"queries": list(self.queries), "meaning": list(self.meaning)}
        return {"positions": self.positions, "by": by, "archived": self.archived, "seconds": self.seconds}


def question_of(tokenizer: Any, ids: list[int]) -> tuple[list[int], list[int]]:
    """A prompt as its document and the question at its end: the last paragraph, of 32 to 256 tokens.

    It begins behind an empty line; where there is none so near, behind the last line's beginning. What a chat template
    puts behind the question counts to it.
    """
    line = None
    for count in range(SHORTEST_QUESTION, min(LONGEST_QUESTION, len(ids))):
        if "\n" in tokenizer.decode(ids[-count - 1 : -count]):
            if _EMPTY_LINE.search(tokenizer.decode(ids[-count - _EMPTY_LINE_TOKENS : -count])):
                return ids[:-count], ids[-count:]
            line = line or count
    count = line or max(1, min(SHORTEST_QUESTION, len(ids) - 1))
    return ids[: len(ids) - count], ids[len(ids) - count :]


def read(
    model: Any, caches: list[Any], ids: list[int], step: int, progress: Callable[[int, int], None] = lambda *_: None
) -> None:
    """Read tokens over caches as mlx-lm does, `step` at a time."""
    for start in range(0, len(ids), step):
        with mx.stream(generation_stream):
            model(mx.array(ids[start : start + step])[None], cache=caches)
            mx.eval([cache.state for cache in caches])
        mx.clear_cache()
        progress(min(start + step, len(ids)), len(ids))


def ready_to_recall(caches: list[Any], count: int) -> bool:
    """Hold the round that a question of `count` tokens makes due; returns whether anything is archived.

    The passes of question and answer would hold it, too late for what leaves then to come back. It is held with and
    without an archive, so that one that fails changes no token.
    """
    sequence = sequence_in(caches)
    if sequence is None:
        return False
    sequence.make_room(sequence_layers(caches), count)
    return bool(sequence.archived)


def live_positions(caches: list[Any], tokens: int) -> np.ndarray:
    """Positions that caches of so many tokens hold, int64 [N]: all where no layer is compressed."""
    layers = compressed_caches(caches)
    return layers[0].positions if layers else np.arange(tokens)


def named_blocks(caches: list[Any], named: Named) -> list[Extent]:
    """The archived blocks in which lies what a search named, and what the caches do not hold; as this rank knows."""
    sequence = sequence_in(caches)
    if sequence is None or not named.ranges:
        return []
    return holding(sequence.archived, named.ranges, live_positions(caches, 0), named.limit)


def recall(
    model: Any, caches: list[Any], ids: list[int], step: int, most: int | None = None, named: Named = NOWHERE
) -> Recalled:
    """Bring back what a question needs; `release` lets it leave again.

    Of a longer message the last 256 tokens ask: a look costs no more than reading them, and of the rest no more leaves
    at once than what its steps make due.

    Args:
        model: of the caches.
        caches: before the message was read.
        ids: tokens of the message.
        step: tokens read at a time.
        most: tokens that the queries bring back; by default what the eviction's configuration says.
        named: what comes beside them.
    """
    began = time.perf_counter()
    sequence, question = sequence_in(caches), ids[-LONGEST_QUESTION:]
    if sequence is None or not ready_to_recall(caches, len(question)):
        return Recalled()
    most = sequence.plan.recall_tokens(len(ids) + sequence_layers(caches)[0].offset) if most is None else most
    fork = copy.deepcopy(caches)
    layers = sequence_layers(fork)
    asking = sequence_in(fork)
    assert asking is not None  # noqa: S101 - tells the type checker: a copy has what it was copied from
    asking.listen(looking(len(layers)), rounds=False)
    with compressed(model):
        read(model, fork, question, step)
    ranked, found = asking.look(layers, len(question), most)
    if named.ranges:
        sequence.agree()
    beside = named_blocks(caches, named)
    if found or beside:
        sequence.recall(sequence_layers(caches), dict.fromkeys([*found, *beside]))
    queries, meaning = (np.intersect1d(positions_of(each), sequence.recalled) for each in (found, beside))
    seconds = time.perf_counter() - began
    return Recalled(tuple(queries.tolist()), tuple(meaning.tolist()), tuple(ranked), tuple(beside), seconds)


def release(caches: list[Any]) -> None:
    """Let what was recalled leave the caches again."""
    sequence = sequence_in(caches)
    if sequence is not None:
        sequence.release(sequence_layers(caches))


def archive_warning(caches: list[Any]) -> str | None:
    """What a user should know of the archive, once."""
    sequence = sequence_in(caches)
    return None if sequence is None or sequence.archive is None else sequence.archive.take_warning()
