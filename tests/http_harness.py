"""Run a server in its own process on a free port, and load it from several connections."""

import json
import re
import resource
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
    """The server ended before it listened."""

    def __init__(self, code: int, log: str) -> None:
        super().__init__(f"exit code {code}: {log}")
        self.code = code


class ServerProcess:
    """A command that serves HTTP. The first group of `listening` matches its address on stderr."""

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
        self._local, self._clients = threading.local(), ExitStack()

    @property
    def http(self) -> httpx.Client:
        """The calling thread's client. Threads that share one close each other's new connections."""
        if not hasattr(self._local, "client"):
            client = httpx.Client(base_url=self.url, headers=self._headers, timeout=120)
            self._local.client = self._clients.enter_context(client)
        return self._local.client

    def _wait_for_url(self) -> str:
        wait_for(lambda: self.listening.search(self.log()) or self.process.poll() is not None, START_S)
        if match := self.listening.search(self.log()):
            return match[1]
        raise ServerExitedError(self.process.returncode, self.log())

    def log(self) -> str:
        return self.log_path.read_text()

    def resident_bytes(self) -> int:
        return psutil.Process(self.process.pid).memory_info().rss

    def kill(self) -> None:
        """End it as a power cut would."""
        self.process.kill()
        self.process.wait()
        self._clients.close()

    def stop(self, sig: int = signal.SIGTERM) -> int:
        """End it with a signal; return its exit code."""
        self._clients.close()
        with self.process:
            try:
                self.process.send_signal(sig)
                return self.process.wait(STOP_S)
            finally:
                self.process.kill()


def wait_for(condition: Callable[[], Any], timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


@contextmanager
def polled(server: ServerProcess, path: str) -> Iterator[list[float]]:
    """Poll a path from another thread; yield the list of the seconds that each answer took."""
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
    """Limit the open files of processes that start meanwhile; they may raise the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def connections(url: str, count: int, sent: bytes, receive_buffer: int | None = None) -> Iterator[list[socket.socket]]:
    """Open connections that each send the same bytes and wait."""
    host, port = url.removeprefix("http://").split(":")
    with ExitStack() as stack, open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1]):
        opened = []
        for _ in range(count):
            connection = stack.enter_context(socket.socket())
            connection.settimeout(120)
            if receive_buffer is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            connection.connect((host, int(port)))
            connection.sendall(sent)
            opened.append(connection)
        yield opened


def post_bytes(path: str, body: Any) -> bytes:
    """Return a request as it is sent."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content
