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


def compute_weights(model: Any) -> None:
    """Finish what the thread that made a model may have left, such as a change of its type."""
    mx.eval([value for module in model.modules() for value in module.values() if isinstance(value, mx.array)])


class Worker:
    """A thread that does one thing after the other until `end`."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._unfinished: list[Generator[Any]] = []
        self._lock, self._ended = Lock(), False
        self._thread = Thread(target=_work, args=[self._tasks], name="session", daemon=True)
        self._thread.start()

    def do(self, call: Callable[[], T]) -> T:
        """What `call` returns or raises there. Waits for it; Ctrl-C ends the waiting, not the call.

        Raises:
            ConfigError: the thread has ended.
        """
        if current_thread() is self._thread:
            return call()
        done: Future[T] = Future()
        with self._lock:
            if self._ended:
                raise ConfigError("the session has ended with its program; make a new one.")
            self._tasks.put((done, call))
        return done.result()

    def steps(self, pieces: Generator[T], stop: Callable[[], None]) -> Iterator[T]:
        """The pieces of a generator that runs there, one at a time as they are taken; `stop` makes it give up soon."""
        self._unfinished.append(pieces)
        try:
            while (piece := self.do(lambda: next(pieces, _END))) is not _END:
                yield piece
        except BaseException:  # Ctrl-C here stops nothing there
            stop()
            raise
        finally:
            if not self._ended:
                self.do(pieces.close)
                self._unfinished.remove(pieces)

    def end(self) -> None:
        """End the thread after what it was given, and wait for that; what is half done is given up there."""
        with self._lock:
            if not self._ended:
                self._ended = True
                self._tasks.put((Future(), self._give_up))
                self._tasks.put(None)
        if current_thread() is not self._thread:
            self._thread.join()

    def _give_up(self) -> None:
        for pieces in self._unfinished:
            pieces.close()


def _work(tasks: "SimpleQueue[_Task | None]") -> None:
    try:
        while (task := tasks.get()) is not None:
            done, call = task
            try:
                done.set_result(call())
            except BaseException as error:  # noqa: BLE001  it is the caller's
                done.set_exception(error)
            del task, done, call  # they hold the session, which ends this thread when nobody has it any more
    finally:
        # A join returns before a thread's own storage is freed. mlx keeps streams there, and a program that ends
        # meanwhile is aborted ("terminate called without an active exception").
        mx.clear_streams()
