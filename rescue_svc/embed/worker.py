"""The child process that runs the embedder, because FAISS and torch crash in one process on macOS, and its owner.

Frames over a pipe, no pickle: a request is a JSON list [whether these are queries, texts]; a reply is one byte of kind,
then the payload. The first reply has the number of dimensions.
"""

import contextlib
import itertools
import json
import logging
import multiprocessing
import queue
import signal
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Literal

import numpy as np

from rescue_svc.embed.embedder import Vectors
from rescue_svc.embed.registry import Choice
from rescue_svc.errors import EmbedderUnavailableError, RescueServiceError

log = logging.getLogger(__name__)

State = Literal["unavailable", "idle", "starting", "ready"]

READY, VECTORS, FAILED = b"R", b"V", b"F"
QUERY, BULK = 0, 1  # priorities: queries go first
MAX_QUERIES = 32  # in one batch
LOAD_TIMEOUT_S = 120.0
WATCH_S = 0.25  # how often an idle child is looked at
LONGEST_PAUSE_S = 60.0


@dataclass(order=True)
class Job:
    priority: int
    number: int
    texts: list[str] = field(compare=False)
    result: "Future[Vectors]" = field(compare=False, default_factory=Future)


class EmbedWorker:
    """Embeds in a child process that starts on demand, is replaced if it dies or hangs, and ends when idle."""

    def __init__(self, choice: Choice, *, timeout_s: float, idle_s: float) -> None:
        self.name, self.model, self.floor = choice.name, choice.model, choice.floor
        self.state: State = "starting"
        self.reason: str | None = "the embedder is loading"
        self.starts = 0
        self._choice = choice
        self._dim = choice.dim
        self._timeout_s = timeout_s
        self._idle_s = idle_s
        self._numbers = itertools.count()
        self._jobs: queue.PriorityQueue[Job] = queue.PriorityQueue()
        self._stopping = threading.Event()
        self._process: SpawnProcess | None = None
        self._pipe: Connection | None = None
        self._failures = 0
        self._last_use = 0.0
        self._thread = threading.Thread(target=self._run, name="embedder", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def dim(self) -> int:
        """Return the length of the vectors; raise EmbedderUnavailableError until a model that defines it is loaded."""
        if self._dim is None:
            raise EmbedderUnavailableError(self.reason or "the embedder is not ready")
        return self._dim

    def query(self, text: str) -> "Future[Vectors]":
        """Return the future vector [1, D] of a query; it fails immediately if the embedder could not start."""
        if self.state == "unavailable":
            self.warm()  # for later queries
            failed: Future[Vectors] = Future()
            failed.set_exception(EmbedderUnavailableError(self.reason or "the embedder is not ready"))
            return failed
        return self._put(QUERY, [text]).result

    def warm(self) -> None:
        if self.state in ("idle", "unavailable") and self._jobs.empty():
            self._put(QUERY, [""])

    def bulk(self, texts: list[str]) -> Vectors:
        """Return the vectors [N, D] of texts, however long that takes; raises EmbedderUnavailableError."""
        return self._put(BULK, texts).result.result()

    def close(self) -> None:
        """End the child and the thread; pending jobs get EmbedderUnavailableError."""
        self._stopping.set()
        self._thread.join()

    def _put(self, priority: int, texts: list[str]) -> Job:
        job = Job(priority, next(self._numbers), texts)
        self._jobs.put(job)
        if self._stopping.is_set():
            self._refuse_all()
        return job

    def _run(self) -> None:
        self._try_to_start()
        while not self._stopping.is_set():
            jobs = self._next_jobs()
            if jobs:
                self._serve(jobs)
            elif self._process and not self._process.is_alive():
                self._replace("the embedder process died")
            elif self._process and time.monotonic() - self._last_use > self._idle_s:
                self._end_child("idle", "the embedder was unloaded because it was idle; it is loading again")
        self._end_child("unavailable", "the service is stopping")
        self._refuse_all()

    def _next_jobs(self) -> list[Job]:
        """Return all pending queries, or one bulk job; none after a while without any."""
        jobs: list[Job] = []
        with contextlib.suppress(queue.Empty):
            jobs.append(self._jobs.get(timeout=WATCH_S))
            while jobs[-1].priority == QUERY and len(jobs) < MAX_QUERIES:
                jobs.append(self._jobs.get_nowait())
        if len(jobs) > 1 and jobs[-1].priority == BULK:
            self._jobs.put(jobs.pop())
        return jobs

    def _serve(self, jobs: list[Job]) -> None:
        running = []
        try:
            if self._process is None:
                self._start()
            running = _without_cancelled(jobs)
            if not running:
                return
            vectors = self._embed(running[0].priority, [text for job in running for text in job.texts])
        except EmbedderUnavailableError as error:
            for job in running or _without_cancelled(jobs):
                job.result.set_exception(error)
            return
        ends = np.cumsum([len(job.texts) for job in running])
        for job, part in zip(running, np.split(vectors, ends[:-1]), strict=True):
            job.result.set_result(part)

    def _embed(self, priority: int, texts: list[str]) -> Vectors:
        assert self._pipe is not None  # noqa: S101 - _start set it; this tells the type checker
        self._last_use = time.monotonic()
        try:
            self._pipe.send_bytes(json.dumps([priority == QUERY, texts]).encode())
            answer = self._receive(self._timeout_s)
        except (EOFError, OSError) as error:
            is_late = isinstance(error, TimeoutError)
            reason = (
                f"the embedder did not respond within {self._timeout_s:g} s" if is_late else "the embedder process died"
            )
            self._replace(reason)
            raise EmbedderUnavailableError(f"{reason} and is restarted") from None
        if answer[:1] != VECTORS:
            raise EmbedderUnavailableError(f"the embedder failed on a text: {answer[1:].decode()}")
        vectors = np.frombuffer(answer, "<f4", offset=1)
        if vectors.size != len(texts) * self.dim():
            fault = f"returned {vectors.size} numbers for {len(texts)} texts of {self.dim()}"
            raise EmbedderUnavailableError(f"the embedder {fault}; correct the plug-in or choose another embedder")
        return vectors.reshape(len(texts), self.dim())

    def _receive(self, timeout_s: float) -> bytes:
        """Return the child's next frame; raises TimeoutError, or EOFError if the child has ended."""
        assert self._pipe is not None  # noqa: S101 - _start set it; this tells the type checker
        deadline = time.monotonic() + timeout_s
        while not self._pipe.poll(min(WATCH_S, timeout_s)):
            if time.monotonic() > deadline:
                raise TimeoutError
            if self._stopping.is_set():
                raise EOFError
        return self._pipe.recv_bytes()

    def _start(self) -> None:
        if not self._failures:  # else the reason of the last failure stands until a start succeeds
            self.state, self.reason = "starting", "the embedder is loading"
        try:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            with theirs:  # closed here, so that the pipe ends when the child does
                process = context.Process(
                    target=run_child, args=(theirs, self._choice), name="rescue-embedder", daemon=True
                )
                process.start()
            self._process = process
            self.starts += 1
            answer = self._receive(LOAD_TIMEOUT_S)
        except (EOFError, OSError):  # also TimeoutError
            answer = FAILED + b"the embedder process could not start, or ended while it was loading"
        if answer[:1] != READY:
            reason = answer[1:].decode()
            self._failures += 1
            # Before the state changes, so that its readers find the reason in the log.
            log.warning("the embedder did not start", extra={"reason": reason})
            self._end_child("unavailable", reason)
            # Do not restart a child that cannot load in a loop.
            self._stopping.wait(min(2.0**self._failures, LONGEST_PAUSE_S))
            raise EmbedderUnavailableError(reason)
        self._failures = 0
        self._dim = int(answer[1:])
        self._last_use = time.monotonic()
        self.state, self.reason = "ready", None

    def _try_to_start(self) -> None:
        with contextlib.suppress(EmbedderUnavailableError):  # visible in the state; the next text tries again
            self._start()

    def _replace(self, reason: str) -> None:
        if not self._stopping.is_set():
            log.warning("the embedder is restarted", extra={"reason": reason})
            self._end_child("starting", reason)
            self._try_to_start()

    def _end_child(self, state: State, reason: str) -> None:
        self.state, self.reason = state, reason
        if self._pipe:
            self._pipe.close()
        if self._process:
            self._process.kill()
            self._process.join()
        self._process = self._pipe = None

    def _refuse_all(self) -> None:
        while not self._jobs.empty():
            for job in _without_cancelled([self._jobs.get()]):
                job.result.set_exception(EmbedderUnavailableError("the service is stopping"))


def _without_cancelled(jobs: list[Job]) -> list[Job]:
    """Return the jobs that were not cancelled; from here on they cannot be."""
    return [job for job in jobs if job.result.set_running_or_notify_cancel()]


def run_child(pipe: Connection, choice: Choice) -> None:
    """Load the embedder and answer until the pipe closes, which it also does when the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes the pipe
    logging.disable()  # libraries might log text
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            embedder = choice.build()
            embedder.embed(["warm-up"])
        except Exception as error:  # noqa: BLE001 - the parent reports whatever it is
            reason = str(error) if isinstance(error, RescueServiceError) else f"{type(error).__name__}: {error}"
            pipe.send_bytes(FAILED + reason.encode())
            return
        pipe.send_bytes(READY + str(embedder.dim).encode())
        embed_queries = getattr(embedder, "embed_queries", embedder.embed)
        while True:
            are_queries, texts = json.loads(pipe.recv_bytes())
            try:
                reply = VECTORS + (embed_queries if are_queries else embedder.embed)(texts).astype("<f4").tobytes()
            except Exception as error:  # noqa: BLE001 - one bad text must not end the embedder
                reply = FAILED + type(error).__name__.encode()
            pipe.send_bytes(reply)
