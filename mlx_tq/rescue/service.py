"""Where the rescue service is: at a URL, or a private one that ends with us.

A private one is a child process on a free loopback port, with a token and a folder of its own. It ends when it is told
to, when this process ends, and also when this process is killed: it watches a pipe that only we hold open. It
deletes its folder; we do so where it was killed. What it says goes to a file without a name: its folder holds nothing
but its own, and nothing is left of that file either.
"""

import asyncio
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from mlx_tq.errors import ConfigError, RescueError
from mlx_tq.rescue.wire import http_errors

OFF, AUTO = "off", "auto"
DEFAULT_URL = "http://127.0.0.1:5054"
TOKEN_VARIABLE = "RESCUE_TOKEN"  # noqa: S105  the service's own name for it

_COMMAND = (sys.executable, "-m", "rescue_svc", "serve")
# Settings of a private service that are ours to choose; the environment may say the rest, such as RESCUE_EMBEDDER.
_OURS = ("RESCUE_DATA_DIR", "RESCUE_STORE", "RESCUE_HOST", "RESCUE_PORT", TOKEN_VARIABLE, "RESCUE_CONFIG")
_START_S, _STOP_S, _PROBE_S = 60.0, 5.0, 0.5
_QUERY_S = "0.4"  # a question's vector may take so long; then words alone answer, still within a turn's patience


class Address(NamedTuple):
    """Of a service, without a final slash, and the token that it asks for."""

    url: str
    token: str | None

    @property
    def headers(self) -> dict[str, str]:
        """The headers that each call carries."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}


class Service(Protocol):
    """What a client needs to know of a service."""

    async def address(self, http: Any) -> Address:
        """Where it is; starts it where that is our job. Raises RescueError if it cannot be started."""

    def stop(self) -> None:
        """End it where we started it."""


def open_service(where: str, token: str | None = None) -> Service:
    """The service that `--rescue` names: a URL, or "auto".

    Args:
        where: of the service.
        token: that it asks for; by default what RESCUE_TOKEN holds.

    Raises:
        ConfigError: neither.
    """
    if find_spec("httpx2") is None:
        raise ConfigError(
            "rescue needs httpx2; install it with `pip install 'mlx-tq[rescue]'`, or choose --rescue off."
        )
    if token is None:
        token = os.environ.get(TOKEN_VARIABLE) or None
    if where == AUTO:
        return AutoService(token)
    parts = urlsplit(where)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query or parts.fragment:
        raise ConfigError(
            f"rescue is {where!r}; it must be {OFF}, {AUTO} or a URL such as {DEFAULT_URL}. A token goes into the "
            f"variable {TOKEN_VARIABLE}."
        )
    return FixedService(Address(where.rstrip("/"), token))


class FixedService:
    """A service that somebody else runs."""

    def __init__(self, address: Address) -> None:
        self._address = address

    async def address(self, http: Any) -> Address:
        """Where the service is."""
        return self._address

    def stop(self) -> None:
        """Do nothing: the service is not ours."""


class AutoService:
    """The service on this machine's usual port if one answers, else a private one."""

    def __init__(self, token: str | None) -> None:
        self._token = token
        self._found: Address | None = None
        self._private: PrivateService | None = None

    async def address(self, http: Any) -> Address:
        """Look for the usual one first; a private one that has died is started again."""
        if self._found is None and self._private is None:
            usual = Address(DEFAULT_URL, self._token)
            if await _answers(http, usual):
                self._found = usual
        if self._found is not None:
            return self._found
        if self._private is None:
            self._private = PrivateService()
        return await self._private.address(http)

    def stop(self) -> None:
        """End the private service, if one was started."""
        if self._private is not None:
            self._private.stop()


async def _answers(http: Any, address: Address) -> bool:
    """A rescue service answers at `address`, and takes our token."""
    try:
        async with asyncio.timeout(_PROBE_S):
            answer = await http.get(f"{address.url}/readyz", headers=address.headers)
            return bool(answer.status_code == 200 and answer.json()["status"] == "ready")
    except http_errors():  # a TimeoutError is an OSError, too
        return False
    except (ValueError, KeyError, TypeError):
        return False


class PrivateService:
    """A child process that serves only this process; its texts are deleted with it."""

    def __init__(self) -> None:
        self._token = secrets.token_urlsafe(32)
        self._folder = _new_folder()
        self._log: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._url = ""
        self._fault: str | None = None
        self._end: Callable[[], object] = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    async def address(self, http: Any) -> Address:
        """Where it is, started if it is not running.

        Raises:
            RescueError: it does not start; the message says what it said.
        """
        if self._fault is not None:
            raise RescueError(self._fault)
        if self._process is None or self._process.poll() is not None:
            self._start()
            try:
                self._url = await self._listening()
            except RescueError as error:
                self._fault = str(error)  # it would not start the next time either
                raise
        return Address(self._url, self._token)

    def stop(self) -> None:
        """End it and delete its texts."""
        self._end()

    @property
    def pid(self) -> int | None:
        """Of the process, if it was started."""
        return self._process.pid if self._process else None

    def _start(self) -> None:
        if not self._folder.exists():  # one that was told to end has deleted it
            self._folder = _new_folder()
        environment = {"RESCUE_QUERY_TIMEOUT_S": _QUERY_S}
        environment |= {name: value for name, value in os.environ.items() if name not in _OURS}
        environment |= {
            "RESCUE_DATA_DIR": str(self._folder),
            "RESCUE_PORT": "0",
            TOKEN_VARIABLE: self._token,
            "RESCUE_EPHEMERAL": "true",
        }
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the process
        self._process = subprocess.Popen(  # noqa: S603  our own module
            _COMMAND,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C in the terminal is for us
        )
        # At the latest when this object or the interpreter ends; folders that are gone are no error.
        self._end = weakref.finalize(self, _end, self._process, self._folder, self._log)

    async def _listening(self) -> str:
        """The URL that the child says it listens on."""
        process = self._process
        try:
            async with asyncio.timeout(_START_S):
                while True:
                    lines = _complete_lines(self._log)
                    for line in lines:
                        if url := _url_of(line):
                            return url
                    if process is not None and process.poll() is not None:
                        said = lines[-1] if lines else f"exit code {process.returncode}"
                        raise RescueError(
                            f"the private rescue service did not start: {said}. Install what it needs with "
                            "`pip install 'mlx-tq[rescue]'`, or choose --rescue off."
                        )
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise RescueError(
                f"the private rescue service did not start within {_START_S:.0f} s; start one with `mlx-tq-rescue "
                "serve` and see what it says, or choose --rescue off."
            ) from None


def _new_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="mlx-tq-rescue-"))


def _complete_lines(log: IO[bytes] | None) -> list[str]:
    if log is None:
        return []
    # From its start, and without moving the place where the child writes, which the two share.
    said = os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0)
    return said.decode("utf-8", errors="replace").split("\n")[:-1]


def _url_of(line: str) -> str | None:
    try:
        said = json.loads(line)
        return str(said["url"]) if said["event"] == "listening" else None
    except (ValueError, KeyError, TypeError):
        return None


def _end(process: subprocess.Popen[bytes], folder: Path, log: IO[bytes]) -> None:
    """Ask the child to end, make it end, and delete its folder."""
    pipe: IO[bytes] | None = process.stdin
    if pipe is not None:
        pipe.close()
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    log.close()
    shutil.rmtree(folder, ignore_errors=True)
