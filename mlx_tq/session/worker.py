"""`Worker`: the one thread in which all of a session's arrays are made, whichever threads the session is called from.

What mlx has not computed yet belongs to a stream of the thread that asked for it, and no other thread can finish it.
"""

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Lock, Thread, current_thread
from typing import Any, TypeVar

import mlx.core as mx

from mlx_tq.errors import ConfigError

T = TypeVar("T")
_Task = tuple[Future[Any], Callable[[], Any]]
_END: Any = object()


class Worker:
    """A thread that runs calls one after the other until `end`."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._generators: list[Generator[Any]] = []  # not finished yet
        self._lock, self._has_ended = Lock(), False
        self._thread = Thread(target=_work, args=[self._tasks], name="session", daemon=True)
        self._thread.start()

    def run(self, call: Callable[[], T]) -> T:
        """Return or raise what `call` does in the thread. Ctrl-C ends the waiting, not the call."""
        if current_thread() is self._thread:
            return call()
        future: Future[T] = Future()
        with self._lock:
            if self._has_ended:
                raise ConfigError("the session has ended with its program; make a new one.")
            self._tasks.put((future, call))
        return future.result()

    def iterate(self, generator: Generator[T], stop: Callable[[], None]) -> Iterator[T]:
        """Yield the items of a generator that runs in the thread; `stop` makes it end soon."""
        self._generators.append(generator)
        try:
            while (item := self.run(lambda: next(generator, _END))) is not _END:
                yield item
        except BaseException:  # Ctrl-C here stops nothing there
            stop()
            raise
        finally:
            if not self._has_ended:
                self.run(generator.close)
                self._generators.remove(generator)

    def end(self) -> None:
        """Wait for the calls so far, close unfinished generators, and end the thread."""
        with self._lock:
            if not self._has_ended:
                self._has_ended = True
                for generator in self._generators:
                    self._tasks.put((Future(), generator.close))
                self._tasks.put(None)
        if current_thread() is not self._thread:
            self._thread.join()


def _work(tasks: "SimpleQueue[_Task | None]") -> None:
    try:
        while (task := tasks.get()) is not None:
            future, call = task
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - the caller gets it
                future.set_exception(error)
            del task, future, call  # they hold the session, and this thread ends when nothing else does
    finally:
        # A join returns before a thread's own storage is freed. mlx keeps streams there, and a program that ends
        # meanwhile is aborted ("terminate called without an active exception").
        mx.clear_streams()
