"""The background's work: spans that were committed get their vectors."""

import logging
import threading

from rescue_svc.embed import EmbedWorker
from rescue_svc.errors import EmbedderUnavailableError, RescueServiceError
from rescue_svc.store import Store

log = logging.getLogger(__name__)

PAUSE_S = 1.0
TRIES = 3


class Indexer:
    """One thread that embeds what waits, in the order of writing. A text that fails alone, thrice, is left to BM25."""

    def __init__(self, store: Store, embedder: EmbedWorker, batch: int) -> None:
        self._store = store
        self._embedder = embedder
        self._batch = batch
        self._after = 0  # every span up to here has its vector, or was given up
        self._failures = 0
        self._work = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="indexer", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Say that there is something to embed."""
        self._work.set()

    def close(self) -> None:
        """End the thread; what still waits is embedded at the next start."""
        self._stopping.set()
        self._work.set()
        self._thread.join()

    def _run(self) -> None:
        self._work.set()
        while not self._stopping.is_set():
            self._work.wait()
            self._work.clear()
            try:
                while not self._stopping.is_set() and self._embed_some():
                    pass
            except RescueServiceError as error:
                log.warning("embedding is tried again", extra={"code": error.code})
                self._stopping.wait(PAUSE_S)
                self._work.set()

    def _embed_some(self) -> bool:
        """Embed the next batch; tell whether there was one. After a failure texts go one by one: one may be bad."""
        spans = self._store.pending(self._embedder.model, self._after, 1 if self._failures else self._batch)
        if not spans:
            return False
        try:
            vectors = self._embedder.bulk([span.text for span in spans])
        except EmbedderUnavailableError:
            self._failures += 1
            # While the embedder is down no text is to blame: it stays pending.
            if self._failures > TRIES and self._embedder.state == "ready":
                log.warning("a span cannot be embedded and is left to BM25", extra={"span": spans[0].span})
                self._after, self._failures = spans[0].span, 0
            raise
        self._failures = 0
        self._store.store_vectors(self._embedder.model, spans, vectors)
        self._after = spans[-1].span
        return True
