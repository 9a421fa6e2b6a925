"""A background thread that embeds committed spans."""

import logging
import threading

from rescue_svc.embed import EmbedWorker
from rescue_svc.errors import EmbedderUnavailableError, RescueServiceError
from rescue_svc.store import Pending, Store, Vectors

log = logging.getLogger(__name__)

PAUSE_S = 1.0
POLL_S = 5.0  # another process on the same store may have ended before it embedded its spans
TRIES = 3


class Indexer:
    """Embeds pending spans in the order of writing. A text that fails three times on its own is left to BM25."""

    def __init__(self, store: Store, embedder: EmbedWorker, batch: int) -> None:
        self._store = store
        self._embedder = embedder
        self._batch = batch
        self._failures = 0
        self._work = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="indexer", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        self._work.set()

    def close(self) -> None:
        self._stopping.set()
        self._work.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                is_busy = True
                while is_busy and not self._stopping.is_set():
                    batch = 1 if self._failures else self._batch  # to find the text that fails
                    is_busy = self._store.embed_next(self._embedder.model, batch, self._vectors)
            except RescueServiceError as error:
                log.warning("embedding is retried", extra={"code": error.code})
                self._stopping.wait(PAUSE_S)
            else:
                self._work.wait(POLL_S)
                self._work.clear()

    def _vectors(self, spans: list[Pending]) -> Vectors:
        try:
            vectors = self._embedder.bulk([span.text for span in spans])
        except EmbedderUnavailableError:
            self._failures += 1
            # While the embedder is down, no text is at fault and all stay pending.
            if self._failures > TRIES and self._embedder.state == "ready":
                log.warning("a span cannot be embedded and is left to BM25", extra={"span": spans[0].span})
                self._store.give_up(self._embedder.model, spans[0].span)
                self._failures = 0
            raise
        self._failures = 0
        return vectors
