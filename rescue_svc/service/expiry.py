"""A background thread that deletes sessions whose client has ended without deleting them."""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from rescue_svc.errors import SessionNotFoundError
from rescue_svc.store import Store

log = logging.getLogger(__name__)

CHECK_S = 60.0
GRACE_S = 900.0  # three renewals of mlx_tq's client, which may just have been suspended together with this service


class Expiry:
    """Calls `forget` with name and expiry of a session that was seen expired for `GRACE_S`."""

    def __init__(self, store: Store, forget: Callable[[str, float], object]) -> None:
        self._store, self._forget = store, forget
        self._expired: dict[tuple[str, float], float] = {}  # by name and expiry: when that was first seen
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="expiry", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(CHECK_S):
            try:
                self._forget_expired()
            except Exception:  # whatever it is, later sessions are to be deleted, too
                log.warning("deleting expired sessions is retried", exc_info=True)

    def _forget_expired(self) -> None:
        now = time.monotonic()  # does not jump if the clock is set or the machine sleeps
        expired = [(s.name, s.expires) for s in self._store.sessions() if s.expires and s.expires <= time.time()]
        self._expired = {key: self._expired.get(key, now) for key in expired}
        for (name, expires), since in self._expired.items():
            if now - since >= GRACE_S:
                with suppress(SessionNotFoundError):  # renewed, or another service on the database was faster
                    self._forget(name, expires)
                    log.info("a session has expired and is deleted")
