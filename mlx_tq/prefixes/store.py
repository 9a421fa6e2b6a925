"""`PrefixStore`: a prompt whose beginning was read before goes on from there, bit for bit as if it were read now."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from mlx_tq.errors import CacheFormatError
from mlx_tq.prefixes.folder import BLOCKS, LIMIT, POINTS, Folder
from mlx_tq.prefixes.keys import Step, computing, root, steps
from mlx_tq.prefixes.points import Point, block_name, from_record
from mlx_tq.sequence.passes import sequence_in
from mlx_tq.sequence.plan import Plan
from mlx_tq.sequence.statistics import tokens_seen
from mlx_tq.user_folders import cache_folder

AUTO, OFF = "auto", "off"


def open_folder(store: str | Folder | None, limit: int = LIMIT) -> Folder | None:
    """The folder that a user names: "auto" is one in the user's cache folder, "off" or nothing is none.

    Raises:
        ConfigError: as `Folder`.
    """
    if isinstance(store, Folder):
        return store
    path = cache_folder() / "prefixes" if store == AUTO else Path(store or OFF).expanduser()
    return None if store in (None, OFF) else Folder(path, limit)


class PrefixStore:
    """What one model reads into caches of one plan, in a folder.

    Args:
        model: of mlx-lm. All its weights are read once, to tell it from others.
        plan: of its caches.
        folder: of the records.
        warn: told, once, where nothing more can be stored.

    Attributes:
        full: nothing more can be stored.
    """

    def __init__(self, model: Any, plan: Plan, folder: Folder, warn: Callable[[str], None]) -> None:
        self.plan, self.folder, self._warn = plan, folder, warn
        self._root, self._computing = root(model, plan), computing()
        self.full = False

    @contextmanager
    def reading(self, caches: list[Any], ids: list[int], step: int) -> Iterator["Reading"]:
        """Fill empty caches with what the store has of a prompt's beginning, and store what is read of the rest.

        Args:
            caches: that nothing was read into; replaced by others, in this list, where the store has something.
            ids: tokens of the prompt that are read in steps; of mlx-lm all but the last.
            step: tokens of a step, counted from the prompt's first.
        """
        reading = StoredReading(self, caches, steps(self._root, ids, step))
        try:
            yield reading
        finally:
            reading.close()

    @property
    def serves(self) -> bool:
        """More can be stored: there is room, and what computes is what it was."""
        return not self.full and computing() == self._computing

    def refused(self, error: OSError) -> None:
        """Store nothing more, and say so."""
        self.full = True
        self._warn(
            f"what is read cannot be stored in {self.folder.path} ({error.strerror}), so it will be read again. The "
            "conversation goes on."
        )


def reading(
    store: PrefixStore | None, caches: list[Any], ids: list[int], step: int
) -> AbstractContextManager["Reading"]:
    """As `PrefixStore.reading`, or a reading that stores and finds nothing where there is no store."""
    return nullcontext(Reading()) if store is None else store.reading(caches, ids, step)


class Reading:
    """A prompt that is read without a store.

    Attributes:
        restored: tokens that were there without being read.
    """

    restored = 0

    def note(self, stop: int) -> None:
        """Tokens before position `stop` have been read."""


class StoredReading(Reading):
    """A prompt that is read with a store."""

    def __init__(self, store: PrefixStore, caches: list[Any], ends: list[Step]) -> None:
        self._store, self._folder, self._caches = store, store.folder, caches
        self._ends = dict(ends)
        self._blocks: list[str] = []  # names of those that are stored
        self._points: list[str] = []  # likewise, of this prompt
        for end in reversed(ends):
            if self._restore(end):
                break

    def _restore(self, end: Step) -> bool:
        """Take over a resume point, if it is there."""
        data = self._folder.read(POINTS, end.key)
        if data is None:
            return False
        names: list[str] = []

        def read(name: str) -> bytes | None:
            names.append(name)
            return self._folder.read(BLOCKS, name)

        try:
            found = from_record(data, read)
        except CacheFormatError:
            found = None
        if found is None:
            self._folder.remove(POINTS, end.key)
            return False
        sequence = sequence_in(found)
        for number, calibrator in (sequence.calibrators if sequence else {}).items():
            calibrator.rope = self._store.plan.layers[number].rope  # which no file has
        self._caches[:] = found
        self.restored, self._blocks = end.stop, names
        self._points.append(end.key)
        return True

    def note(self, stop: int) -> None:
        """Tokens before position `stop` have been read; they are stored if a step ended there."""
        key = self._ends.get(stop)
        if key is None or stop <= self.restored or not self._store.serves or not self._is_pure(stop):
            return
        try:
            with self._folder.writing() as may:
                if may:
                    self._write(key)
        except OSError as error:
            self._store.refused(error)

    def _write(self, key: str) -> None:
        point = Point(self._caches)
        for data in point.new_blocks(len(self._blocks)):
            name = block_name(data)
            self._folder.write(BLOCKS, name, data)
            self._blocks.append(name)
        self._folder.write(POINTS, key, point.to_bytes_without(self._blocks))
        self._points.append(key)

    def _is_pure(self, stop: int) -> bool:
        """The caches hold these tokens, all of them and nothing else: none has left, and none came back."""
        sequence = sequence_in(self._caches)
        untouched = sequence is None or not (sequence.stats.rounds or sequence.archived or sequence.held)
        return untouched and tokens_seen(self._caches) == stop

    def close(self) -> None:
        """The answer is complete: wait for the disk, once. Blocks count as used after the points that name them."""
        self._folder.use([*((POINTS, key) for key in self._points), *((BLOCKS, name) for name in self._blocks)])
        if self._points and not self._store.full:
            self._folder.settle(POINTS, self._points[-1])
