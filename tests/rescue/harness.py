"""Clients of the service: in this process, or in its own where a process or a socket matters."""

import io
import json
import os
import re
import shutil
import sys
import time
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from http_harness import ServerProcess, wait_for

from rescue_svc import cli
from rescue_svc.app import create_app
from rescue_svc.opening import open_all
from rescue_svc.service import RescueService
from rescue_svc.settings import load_settings
from rescue_svc.store import Index, Store

URL = "http://127.0.0.1:5054"
TOKEN = "a-token-of-the-tests"
EACH_STORE = pytest.mark.parametrize("storage", ["sqlite", "postgres"], indirect=True)
IN_FULL_EACH_STORE = pytest.mark.parametrize(
    "storage", ["sqlite", pytest.param("postgres", marks=pytest.mark.full)], indirect=True
)


class Calls:
    """The calls of the API."""

    http: httpx.Client

    def write(self, session: str, *chunks: tuple[str, int, int]) -> httpx.Response:
        spans = [{"text": text, "token_range": [start, end], "layer": -1, "score": 0.5} for text, start, end in chunks]
        return self.http.post("/evict/write", json={"session_id": session, "chunks": spans})

    def write_and_embed(self, session: str, *chunks: tuple[str, int, int]) -> None:
        self.write(session, *chunks)
        self.wait_until_embedded()

    def retrieve(self, session: str, query: str, **options: Any) -> dict[str, Any]:
        answer = self.http.post("/evict/retrieve", json={"session_id": session, "query": query, **options})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def search(self, session: str, query: str, **options: Any) -> list[str]:
        """Return the texts that a query finds, best first."""
        return [chunk["text"] for chunk in self.retrieve(session, query, **options)["chunks"]]

    def dump(self, session: str) -> dict[str, Any]:
        return self.http.get("/evict/dump", params={"session_id": session}).json()

    def forget(self, session: str) -> httpx.Response:
        return self.http.delete(f"/sessions/{session}")

    def hibernate(self, session: str) -> dict[str, Any]:
        return self.http.post(f"/sessions/{session}/hibernate").json()

    def resume(self, session: str) -> dict[str, Any]:
        return self.http.post(f"/sessions/{session}/resume").json()

    def sessions(self) -> dict[str, dict[str, Any]]:
        """Return the sessions by name, in the order of the answer."""
        return {session["session_id"]: session for session in self.http.get("/sessions").json()["sessions"]}

    def ready(self) -> dict[str, Any]:
        return self.http.get("/readyz").json()

    def wait_until_embedded(self, timeout: float = 180) -> None:
        wait_for(lambda: (e := self.ready()["embedder"])["state"] == "ready" and e["pending"] == 0, timeout)


class LocalService(Calls):
    """The service in this process, called through its ASGI application."""

    def __init__(self, data_dir: Path, **settings: Any) -> None:
        self.data_dir = data_dir
        self.service = RescueService(load_settings(data_dir=data_dir, **{"embedder": "hashing"} | settings))
        headers = {"Authorization": f"Bearer {settings['token']}"} if "token" in settings else {}
        client = TestClient(create_app(self.service), URL, raise_server_exceptions=False, headers=headers)
        self._running = ExitStack()
        self._running.callback(self.service.close)
        self.http: Any = self._running.enter_context(client)

    def stop(self) -> None:
        self._running.close()

    def killed(self, folder: Path) -> Path:
        """Copy the files as kill -9 would leave them."""
        return Path(shutil.copytree(self.data_dir, folder))


class Server(ServerProcess, Calls):
    listening = re.compile(r'"event": "listening", "url": "([^"]+)"')

    def __init__(self, data_dir: Path, *, logs: Path | None = None, stdin: int | None = None, **settings: Any) -> None:
        self.data_dir = data_dir
        chosen = {"data_dir": data_dir, "embedder": "hashing", "port": 0, **settings}
        clean = {name: value for name, value in os.environ.items() if not name.startswith("RESCUE_")}
        super().__init__(
            [sys.executable, "-m", "rescue_svc", "serve"],
            clean | {f"RESCUE_{name.upper()}": str(value) for name, value in chosen.items()},
            (logs or data_dir.parent) / f"service-{time.monotonic_ns()}.log",
            settings.get("token"),
            stdin,
        )

    def lines(self) -> list[dict[str, Any]]:
        """Return the log's complete lines."""
        return [json.loads(line) for line in self.log().split("\n")[:-1] if line.startswith("{")]


def open_store(model: str = "test-1", dim: int = 4, **settings: Any) -> tuple[Store, Index]:
    return open_all(load_settings(**settings), model, lambda: dim)


def command(*words: object) -> SimpleNamespace:
    """Run `mlx-tq-rescue WORDS` in this process; return its exit code, stdout and stderr."""
    out, err = io.TextIOWrapper(io.BytesIO()), io.StringIO()
    usual = os.umask(0)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = cli.main([str(word) for word in words])
    except SystemExit as ended:  # of the parser
        code = ended.code
    finally:
        os.umask(usual)
    out.flush()
    return SimpleNamespace(code=code, out=out.buffer.getvalue().decode(), err=err.getvalue())
