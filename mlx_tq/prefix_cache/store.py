"""`PrefixCache`: a prompt whose beginning was read before goes on from there, bit for bit as if it were read now."""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from mlx_tq.distributed.group import ALONE, Ranks
from mlx_tq.errors import CacheFormatError
from mlx_tq.files import cache_folder
from mlx_tq.prefix_cache.folder import BLOCKS, LIMIT, POINTS, RANK, Folder
from mlx_tq.prefix_cache.keys import Step, computing, root, steps
from mlx_tq.prefix_cache.points import ROWS, Point, block_name, from_record
from mlx_tq.prompt_cache.passes import sequence_in
from mlx_tq.prompt_cache.plan import Plan
from mlx_tq.prompt_cache.statistics import tokens_seen

AUTO, OFF = "auto", "off"
# Points of which it is remembered what came behind them; and ways of going on from which on a point counts as shared:
# with fewer, much stays that nobody asks for again.
_REMEMBERED, _WAYS = 100_000, 4


def open_folder(store: str | Folder | None, limit: int = LIMIT, ranks: Ranks = ALONE) -> Folder | None:
    """The folder that a user names: "auto" is one in the user's cache folder, "off" or nothing is none.

    Of several ranks each has a folder inside that one, as each has other heads of the same tokens.

    Raises:
        ConfigError: as `Folder`.
    """
    if isinstance(store, Folder):
        return store
    if store in (None, OFF):
        return None
    path = cache_folder() / "prefixes" if store == AUTO else Path(store).expanduser()
    return Folder(path if ranks.is_alone else path / f"{RANK}{ranks.rank}-of-{ranks.size}", limit)


class PrefixCache:
    """What one model reads into caches of one plan, in a folder.

    Args:
        model: of mlx-lm. All its weights are read once, to tell it from others.
        plan: of its caches.
        folder: of the records.
        warn: told where what is read cannot be stored; once, until it can be again.
        salt: what is stored with another one is not found.

    Attributes:
        root: what all keys of its prompts begin with.
        live: points that were restored and that somebody still has, by their keys.
    """

    def __init__(self, model: Any, plan: Plan, folder: Folder, warn: Callable[[str], None], salt: str = "") -> None:
        self.plan, self.folder, self._warn = plan, folder, warn
        self.root, self._computing = root(model, plan, salt), computing()
        self._fails = False
        self.live: WeakValueDictionary[str, Restored] = WeakValueDictionary()
        self._followed: dict[str, set[str]] = {}

    def prompt(self, segments: list[list[int]], step: int, system: int = 0) -> "StoredPrompt":
        """A prompt, of which nothing was read yet.

        Args:
            segments: tokens that are read in steps, cut where a step ends in any case.
            step: tokens of a step, counted from the beginning of its segment.
            system: tokens that any conversation may begin with; they stay in the store longer than others.
        """
        return StoredPrompt(self, steps(self.root, segments, step), step, system)

    def is_shared(self, key: str, after: str) -> bool:
        """Prompts went on from the point `key` in several ways, this one with the step `after`."""
        if len(self._followed) > _REMEMBERED:
            self._followed.clear()
        ways = self._followed.setdefault(key, set())
        if len(ways) < _WAYS:
            ways.add(after)
        return len(ways) == _WAYS

    @contextmanager
    def reading(self, caches: list[Any], ids: list[int], step: int) -> Iterator["Reading"]:
        """Fill empty caches with what the store has of a prompt's beginning, and store what is read of the rest.

        Args:
            caches: that nothing was read into; replaced by others, in this list, where the store has something.
            ids: tokens of the prompt that are read in steps; of mlx-lm all but the last.
            step: tokens of a step, counted from the prompt's first.
        """
        prompt = self.prompt([ids], step)
        try:
            started = time.perf_counter()
            caches[:] = prompt.restore() or caches
            prompt.point = None  # these caches alone have the rows
            yield StoredReading(prompt, caches, time.perf_counter() - started)
        finally:
            prompt.close()

    @property
    def is_itself(self) -> bool:
        """What computes is what it was: everything of the store fits."""
        return computing() == self._computing

    def note(self, error: OSError | None) -> None:
        """A record was written, or could not be: which is said of the first that could not."""
        if error is not None and not self._fails:
            self._warn(
                f"what is read cannot be stored in {self.folder.path} ({error.strerror}), so it will be read again. "
                "The conversation goes on."
            )
        self._fails = error is not None


def reading(
    store: PrefixCache | None, caches: list[Any], ids: list[int], step: int
) -> AbstractContextManager["Reading"]:
    """As `PrefixCache.reading`, or a reading that stores and finds nothing where there is no store."""
    return nullcontext(Reading()) if store is None else store.reading(caches, ids, step)


class Reading:
    """A prompt that is read without a store.

    Attributes:
        restored: tokens that were there without being read.
        seconds: that it took to restore them.
    """

    restored = 0
    seconds = 0.0

    def note(self, stop: int) -> None:
        """Tokens before position `stop` have been read."""


class StoredReading(Reading):
    """A prompt that is read with a store, into these caches."""

    def __init__(self, prompt: "StoredPrompt", caches: list[Any], seconds: float) -> None:
        self._prompt, self._caches = prompt, caches
        self.restored, self.seconds = prompt.restored, seconds

    def note(self, stop: int) -> None:
        """Tokens before position `stop` have been read; they are stored if a step ended there."""
        if self._prompt.wants(stop):
            self._prompt.store(stop, self._caches)


class Restored:
    """A point as it came from the disk: who restores it while somebody has it shares its rows.

    Attributes:
        caches: that nobody reads into.
        blocks: names of the records with their rows.
    """

    def __init__(self, caches: list[Any], blocks: list[str]) -> None:
        self.caches, self.blocks = caches, blocks


class StoredPrompt:
    """The resume points of one prompt.

    Args:
        store: that has them.
        ends: of the steps in which it is read.
        step: tokens of a whole one.
        system: tokens of it that any conversation may begin with.

    Attributes:
        found: tokens that `look` found.
        restored: tokens that `restore` found.
        reached: tokens before the last point that was restored or stored.
        point: that was restored.
    """

    def __init__(self, store: PrefixCache, ends: list[Step], step: int, system: int) -> None:
        self._store, self._folder, self._ends, self._shared = store, store.folder, dict(ends), system
        self._ranks = store.plan.ranks
        # A conversation that goes on has a longer step where it had a last one.
        self._after = {a.stop: b.key for a, b in pairwise(ends) if b.stop - a.stop == step}
        self._blocks: list[str] = []  # names of those that are stored
        self._points: list[str] = []  # likewise, of this prompt
        self.restored = self.reached = 0
        self.found = 0
        self._most = max(self._ends, default=0)  # behind which a point is not usable, on some rank
        self.point: Restored | None = None
        self._fails = False  # the disk may be full: the next prompt tries again

    def look(self, *, alone: bool = False) -> int:
        """See how many tokens are before the last point, whole or damaged, that all ranks have.

        Args:
            alone: this rank looks for itself; else all do at once.
        """
        self.found = self._last(self._most) if alone else self._ranks.largest_common(self._last, self._most)
        return self.found

    def restore(self) -> list[Any] | None:
        """The caches of the last point that can be used, on all ranks; None where there is none."""
        while stop := self.look():
            key = self._ends[stop]
            point = self._store.live.get(key) or self._read(key)
            (damaged,) = self._ranks.any([point is None])
            if point is not None and not damaged:
                self._store.live[key] = self.point = point
                self._blocks, self._points = list(point.blocks), [key]
                self.restored = self.reached = stop
                self._note(stop)
                return copy.deepcopy(point.caches)
            self._most = stop - 1
        return None

    def _last(self, most: int) -> int:
        """Tokens, at most so many, before the last point that this rank has."""
        if not self._store.is_itself:
            return 0
        return next((stop for stop in reversed(self._ends) if stop <= most and self._has(self._ends[stop])), 0)

    def _has(self, key: str) -> bool:
        return key in self._store.live or self._folder.holds(POINTS, key)

    @property
    def live(self) -> list[Any] | None:
        """The caches that `restore` would give copies of; None where it would read them from the disk."""
        point = self._store.live.get(self._ends.get(self.found, ""))
        return None if point is None else point.caches

    def follow(self, other: "StoredPrompt", stop: int) -> bool:
        """Go on behind the first `stop` tokens of another prompt, if it has read them in the steps of this one."""
        if stop not in self._ends or self._ends[stop] != other._ends.get(stop):
            return False
        self._blocks, self._points, self.reached = list(other._blocks), other._points[-1:], other.reached
        self._note(self.reached)
        return True

    def _read(self, key: str) -> Restored | None:
        data = self._folder.read(POINTS, key)
        if data is None:
            return None
        names: list[str] = []

        def read(name: str) -> bytes | None:
            names.append(name)
            return self._folder.read(BLOCKS, name)

        try:
            found = from_record(data, read)
        except CacheFormatError:
            found = None
        if found is None:
            self._folder.remove(POINTS, key)
            return None
        sequence = sequence_in(found)
        if sequence is not None:
            sequence.ranks = self._ranks  # which no file has
            sequence.learn(layer.rope for layer in self._store.plan.layers)
        return Restored(found, names)

    def wants(self, stop: int) -> bool:
        """Whether caches of the tokens before position `stop` can be stored: a step ends there, not stored yet."""
        return stop in self._ends and stop > self.reached and not self._fails and self._store.is_itself

    def store(self, stop: int, caches: list[Any]) -> None:
        """Store caches of the tokens before position `stop`, unless they hold other rows or fewer."""
        if not _is_pure(caches, stop):
            return
        try:
            with self._folder.writing() as may:
                if may:
                    self._write(self._ends[stop], caches)
                    self.reached = stop
                    self._note(stop)
                    self._store.note(None)
        except OSError as error:
            self._fails = True
            self._store.note(error)

    def _note(self, stop: int) -> None:
        """A point was restored or stored; prompts may share it."""
        if stop in self._after and self._store.is_shared(self._ends[stop], self._after[stop]):
            self._shared = max(self._shared, stop)

    def _write(self, key: str, caches: list[Any]) -> None:
        point = Point(caches)
        for data in point.new_blocks(len(self._blocks)):
            name = block_name(data, self._store.root)
            self._folder.write(BLOCKS, name, data)
            self._blocks.append(name)
        self._folder.write(POINTS, key, point.to_bytes_without(self._blocks))
        self._points.append(key)

    def close(self) -> None:
        """The prompt is read: wait for the disk, once. Blocks count as used after the points that name them."""
        self._folder.use([*((POINTS, key) for key in self._points), *((BLOCKS, name) for name in self._blocks)])
        if self._shared in self._ends:
            count = max(0, self._shared - self._store.plan.config.sinks) // ROWS
            shared = [(POINTS, self._ends[self._shared]), *((BLOCKS, name) for name in self._blocks[:count])]
            self._folder.use(shared, protect=True)
        if self._points and not self._fails:
            self._folder.settle(POINTS, self._points[-1])


def _is_pure(caches: list[Any], stop: int) -> bool:
    """The caches hold the tokens before `stop`, all and nothing else: none has left, and none came back."""
    sequence = sequence_in(caches)
    untouched = sequence is None or not (sequence.stats.rounds or sequence.archived or sequence.held)
    return untouched and tokens_seen(caches) == stop
