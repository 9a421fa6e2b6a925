"""A real server for the tests: a process of its own on a free port, its log in a file, ended whatever happens."""

import re
import resource
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from processes import killed_on_failure

START_S = 300  # a model is loaded
STOP_S = 120


class ServerExitedError(Exception):
    """The server ended before it listened: its exit code, and what it said."""

    def __init__(self, code: int, said: str) -> None:
        super().__init__(f"exit code {code}: {said}")
        self.code = code


class ServerProcess:
    """A command that serves HTTP. `listening` finds its address, its first group, in what it says on stderr."""

    listening: re.Pattern[str]

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log_path: Path,
        token: str | None = None,
        stdin: int | None = None,
    ) -> None:
        self.log_path = log_path
        with log_path.open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdin=stdin, stderr=log)
        with killed_on_failure(self.process):
            self.url = self._wait_for_url()
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._of_thread, self._clients = threading.local(), ExitStack()

    @property
    def http(self) -> httpx.Client:
        """The calling thread's own client: threads that share one close connections that others were just given."""
        if not hasattr(self._of_thread, "client"):
            made = httpx.Client(base_url=self.url, headers=self._headers, timeout=120)
            self._of_thread.client = self._clients.enter_context(made)
        return self._of_thread.client

    def _wait_for_url(self) -> str:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if found := self.listening.search(self.log()):
                return found[1]
            if self.process.poll() is not None:
                raise ServerExitedError(self.process.returncode, self.log())
            time.sleep(0.01)
        raise TimeoutError(self.log())

    def log(self) -> str:
        """What it said so far."""
        return self.log_path.read_text()

    def resident_bytes(self) -> int:
        return psutil.Process(self.process.pid).memory_info().rss

    def kill(self) -> None:
        """End it as a power cut would."""
        self.process.kill()
        self.process.wait()
        self._clients.close()

    def stop(self, sig: int = signal.SIGTERM) -> int:
        """End it by a signal; return its exit code."""
        self._clients.close()
        with self.process:
            try:
                self.process.send_signal(sig)
                return self.process.wait(STOP_S)
            finally:
                self.process.kill()


def wait_for(condition: Callable[[], Any], timeout: float = 60) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@contextmanager
def polled(server: ServerProcess, path: str) -> Iterator[list[float]]:
    """Poll a path from another thread; the list gets the seconds that each answer took."""
    seconds: list[float] = []
    stopped = threading.Event()

    def poll() -> None:
        while not stopped.wait(0.01):
            began = time.monotonic()
            assert server.http.get(path).status_code == 200
            seconds.append(time.monotonic() - began)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        wait_for(lambda: seconds)
        yield seconds
    finally:
        stopped.set()
        thread.join()


@contextmanager
def open_files(count: int) -> Iterator[None]:
    """What is started meanwhile may have so many files open at first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def connections(url: str, count: int, sent: bytes, receive_buffer: int | None = None) -> Iterator[list[socket.socket]]:
    """So many connections to a server, each of which sent the same and waits."""
    host, port = url.removeprefix("http://").split(":")
    with ExitStack() as stack, open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1]):
        made = []
        for _ in range(count):
            made.append(stack.enter_context(socket.socket()))
            made[-1].settimeout(120)
            if receive_buffer is not None:
                made[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            made[-1].connect((host, int(port)))
            made[-1].sendall(sent)
        yield made


def slowest_answer(url: str, count: int = 20) -> float:
    """The seconds of the slowest of some GET requests, each on a connection of its own."""
    seconds = []
    for _ in range(count):
        began = time.monotonic()
        assert httpx.get(url).status_code == 200
        seconds.append(time.monotonic() - began)
    return max(seconds)


def answered(made: list[socket.socket]) -> int:
    """How many of these connections have been answered or closed."""
    with selectors.DefaultSelector() as selector:
        for connection in made:
            selector.register(connection, selectors.EVENT_READ)
        return len(selector.select(0))
