"""Finds the rescue service: at a URL, by the socket of this user's own, or a private one that this process starts.

A private service is a child process on a free loopback port, with a token and a folder of its own. It ends with this
process, even if that is killed: it watches a pipe that only this process holds open. It deletes its folder; this
process does if the service was killed. Its log goes to an unlinked file.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from http_limits.service_socket import SOCKET, connect_private, default_data_dir
from mlx_tq.errors import ConfigError, RescueError, one_line

T = TypeVar("T")

OFF, AUTO = "off", "auto"
_LOCAL = "http://localhost"  # behind a socket
_EXAMPLE_URL = "http://127.0.0.1:5054"
TOKEN_VARIABLE = "RESCUE_TOKEN"  # noqa: S105  the service's own name for it
_FOLDER_VARIABLE = "RESCUE_DATA_DIR"

# The environment may set everything else, such as RESCUE_EMBEDDER.
_RESERVED = (_FOLDER_VARIABLE, "RESCUE_STORE", "RESCUE_HOST", "RESCUE_PORT", TOKEN_VARIABLE, "RESCUE_CONFIG")
START_S = 60.0  # that a private service may take to start
_STOP_S, _PROBE_S, _POLL_S = 5.0, 0.5, 0.02
# What the service imports and mlx_tq itself does not; the extra `rescue` installs it.
_PACKAGES = ("fastapi", "starlette", "uvicorn", "httptools", "pydantic_settings", "prometheus_client", "faiss")


class Address(NamedTuple):
    """URL of a service without a final slash, the token that it requires, and its socket if that is to be used."""

    url: str
    token: str | None
    socket: Path | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def connect(self) -> Any:
        """Return an HTTP client."""
        import httpx2  # a quarter of a second, which no caller waits for

        # No proxies or passwords from the environment: the text is for this service alone.
        transport = httpx2.HTTPTransport(uds=str(self.socket) if self.socket else None, trust_env=False)
        return httpx2.Client(transport=transport, trust_env=False)


def open_service(location: str) -> "ServiceLocator":
    """Return the service at a URL; "auto" is this user's own in the default folder if it runs, else a private one.

    The folder is RESCUE_DATA_DIR if that is set, the token RESCUE_TOKEN.
    """
    token = os.environ.get(TOKEN_VARIABLE) or None
    parts = urlsplit(location)
    is_url = parts.scheme in ("http", "https") and parts.hostname
    if location != AUTO and (not is_url or parts.username or parts.query or parts.fragment):
        raise ConfigError(
            f"rescue is {location!r}; it must be {OFF}, {AUTO} or a URL such as {_EXAMPLE_URL}. A token goes into the "
            f"variable {TOKEN_VARIABLE}."
        )
    return ServiceLocator(None if location == AUTO else location.rstrip("/"), token)


class ServiceLocator:
    """Finds the service for a client, which calls `address` from one thread at a time; private without a `url`."""

    def __init__(self, url: str | None, token: str | None) -> None:
        self._address = None if url is None else Address(url, token)
        self._token = token
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._fault: str | None = None
        self._end: weakref.finalize[Any, Any] | None = None
        self._is_stopped = False

    def address(self) -> Address:
        """Return the address; start a private service if needed, and raise RescueError if that fails."""
        if self._fault is not None:
            raise RescueError(self._fault)
        if self._address is None:
            by_socket = Address(_LOCAL, self._token, _own_socket())
            self._address = by_socket if _answers(by_socket) else self._start()
        elif self._process is not None and self._process.poll() is not None:
            if self._end is not None and (finalizer := self._end.detach()):
                process, _, log = finalizer[2]  # the next service takes the folder
                _close(process, log)
            self._address = self._start()
        return self._address

    def missing_package_error(self) -> str | None:
        """Return what a private service lacks, if no other one can be used; None if nothing is missing."""
        missing = next((name for name in _PACKAGES if find_spec(name) is None), None)
        if missing is None or self._address is not None or _answers(Address(_LOCAL, self._token, _own_socket())):
            return None
        return f"the private rescue service needs {missing}: pip install 'mlx-tq[rescue]'."

    def stop(self) -> None:
        """Stop a private service, even while it starts."""
        self._is_stopped = True  # first: `_start` looks at it after it has set `_end`
        if self._end is not None:
            self._end()

    def _start(self) -> Address:
        """Start a private service and wait until it listens; a failed start is not repeated."""
        token = secrets.token_urlsafe(32)
        try:
            process, log = self._launch(token)
            return Address(_wait_for_url(process, log), token)
        except OSError as error:
            self._fault = f"the private rescue service cannot be started ({error}); set TMPDIR to a folder with room."
            raise RescueError(self._fault) from error
        except RescueError as error:
            self._fault = str(error)
            raise

    def _launch(self, token: str) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
        """Return the process of a private service, and its log."""
        if self._folder is None or not self._folder.exists():  # one that ended regularly has deleted it
            self._folder = Path(tempfile.mkdtemp(prefix="mlx-tq-rescue-"))
        # A query waits this long for its vector; then keywords alone are searched, within the timeout of a turn.
        environment = {"RESCUE_QUERY_TIMEOUT_S": "0.4"}
        environment |= {name: value for name, value in os.environ.items() if name not in _RESERVED}
        environment |= {
            _FOLDER_VARIABLE: str(self._folder),
            "RESCUE_PORT": "0",
            TOKEN_VARIABLE: token,
            "RESCUE_EPHEMERAL": "true",
        }
        with ExitStack() as on_failure:
            on_failure.callback(shutil.rmtree, self._folder, ignore_errors=True)
            log = on_failure.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(
                (sys.executable, "-m", "rescue_svc", "serve"),
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal is for this process
            )
            on_failure.pop_all()
        self._process = process
        self._end = weakref.finalize(self, _end, process, self._folder, log)  # runs when the interpreter ends, too
        if self._is_stopped:
            self._end()
        return process, log


def _own_socket() -> Path | None:
    folder = os.environ.get(_FOLDER_VARIABLE)
    try:
        return (Path(folder) if folder else default_data_dir()) / SOCKET
    except RuntimeError:  # this user has no home folder, and so no service there
        return None


def _answers(address: Address) -> bool:
    """Return whether this user's own service runs and accepts the token, which no other program gets."""
    if address.socket is None:
        return False
    try:
        connect_private(address.socket, _PROBE_S).close()
    except OSError:
        return False
    with address.connect() as http:
        request = run_in_thread(lambda: http.get(f"{address.url}/readyz", headers=address.headers, timeout=_PROBE_S))
        try:
            response = request.result(_PROBE_S)
            return bool(response.status_code == 200 and response.json()["status"] == "ready")
        except Exception:  # noqa: BLE001  it does not run, or is another program
            return False


def _wait_for_url(process: subprocess.Popen[bytes], log: IO[bytes]) -> str:
    """Return the URL that the service logs once it listens."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        has_ended = process.poll() is not None
        text = b""
        with suppress(ValueError):  # closed: the service was stopped while it started
            # pread from the start does not move the file offset, which the child shares and writes at.
            text = os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0)
        lines = text.decode("utf-8", errors="replace").split("\n")[:-1]
        for line in lines:
            with suppress(ValueError, KeyError, TypeError):  # another line
                record = json.loads(line)
                if record["event"] == "listening":
                    return str(record["url"])
        if has_ended:
            last = lines[-1] if lines else f"exit code {process.returncode}"
            raise RescueError(f"the private rescue service did not start: {one_line(last)}.")
        time.sleep(_POLL_S)
    raise RescueError(
        f"the private rescue service did not start within {START_S:.0f} s; start one with `mlx-tq-rescue serve` and "
        "see its log."
    )


def _end(process: subprocess.Popen[bytes], folder: Path, log: IO[bytes]) -> None:
    """Ask the process to end, kill it if it does not, and delete its folder."""
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _close(process, log)
    shutil.rmtree(folder, ignore_errors=True)


def _close(process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()
    log.close()


def run_in_thread(function: Callable[[], T]) -> Future[T]:
    """Run a function in a daemon thread; unlike an executor's, it does not delay the end of the program."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001  raised where the result is needed
            future.set_exception(error)

    threading.Thread(target=run, name="mlx_tq rescue call", daemon=True).start()
    return future
