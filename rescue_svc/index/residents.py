"""Indexes in memory, loaded on demand from a snapshot or the store and updated with newer vectors."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rescue_svc.index import snapshot
from rescue_svc.index.engines import FaissEngine
from rescue_svc.store import Index, SqliteStore, Vectors

log = logging.getLogger(__name__)


@dataclass
class Resident:
    engine: FaissEngine
    last: int  # sequence number of its newest vector
    lock: threading.Lock = field(default_factory=threading.Lock)


class Residents(Index):
    """Indexes of the sessions in use, at most `max_bytes` of vectors; the least recently used is evicted first."""

    name = "faiss"

    def __init__(self, store: SqliteStore, model: str, dim: Callable[[], int], max_bytes: int) -> None:
        self._store = store
        self._model = model
        self._dim = dim
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._residents: OrderedDict[int, Resident] = OrderedDict()

    def search(self, session: int, query: Vectors, limit: int, excluded: set[int]) -> dict[int, float]:
        resident = self._current(session)
        with resident.lock:
            return resident.engine.search(query, limit, excluded)

    def similarities(self, session: int, query: Vectors, spans: Iterable[int]) -> dict[int, float]:
        resident = self._residents.get(session) or self._current(session)
        with resident.lock:
            return resident.engine.similarities(query, list(spans))

    def resume(self, session: int) -> int:
        return len(self._current(session).engine)

    def hibernate(self, session: int) -> int:
        with self._lock:
            resident = self._residents.pop(session, None)
        if resident is None:
            return 0
        with resident.lock:
            if len(resident.engine):
                engine = resident.engine
                try:
                    snapshot.save(self._store.directory, session, engine, self._model, self._dim(), resident.last)
                except OSError as error:  # it is built again from the database
                    log.warning("an index was not saved: %s", error)
        return len(resident.engine)

    def forget(self, session: int) -> None:
        # Under the loading lock: an index that is being built must not be added after it was dropped.
        with self._loading, self._lock:
            self._residents.pop(session, None)
        snapshot.remove(self._store.directory, session)

    def is_resident(self, session: int) -> bool:
        return session in self._residents

    def sizes(self) -> tuple[int, int]:
        with self._lock:
            vectors = sum(len(resident.engine) for resident in self._residents.values())
            return len(self._residents), 4 * vectors * self._dim() if vectors else 0

    def save_all(self) -> None:
        for session in list(self._residents):
            self.hibernate(session)

    def _current(self, session: int) -> Resident:
        """Return a session's index with every vector that the store has now."""
        with self._lock:
            resident = self._residents.get(session)
            if resident:
                self._residents.move_to_end(session)
        if resident is None:
            resident = self._load(session)
        with resident.lock:
            spans, vectors, resident.last = self._store.vectors(session, self._model, resident.last, self._dim())
            if len(spans):
                resident.engine.add(spans, vectors)
        while self.sizes()[1] > self._max_bytes and (oldest := next(iter(self._residents), session)) != session:
            self.hibernate(oldest)
        return resident

    def _load(self, session: int) -> Resident:
        with self._loading:
            resident = self._residents.get(session)
            if resident is None:
                loaded = snapshot.load(self._store.directory, session, self._model, self._dim())
                engine, last = loaded or (None, 0)
                # Recomputed vectors have newer numbers: then the snapshot has vectors that the store has replaced.
                if engine is None or len(engine) != self._store.count_vectors(session, self._model, last):
                    engine, last = FaissEngine(self._dim()), 0
                resident = Resident(engine, last)
                with self._lock:
                    self._residents[session] = resident
        return resident
