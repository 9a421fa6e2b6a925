from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .harness import Server


@pytest.fixture(params=[1, pytest.param(10, marks=pytest.mark.full)], ids=["x1", "x10"])
def scale(request: pytest.FixtureRequest) -> int:
    """How many times the listed count a test runs: once in `make test`, and ten times in `make test-full`."""
    return request.param


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start services on `tmp_path / "data"`, or another folder; all are ended after the test."""
    servers: list[Server] = []

    def start(data_dir: Path = tmp_path / "data", **settings: Any) -> Server:
        servers.append(Server(data_dir, **settings))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.kill()
        server.client.close()


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One service for tests that only add sessions of their own."""
    server = Server(tmp_path_factory.mktemp("shared") / "data")
    yield server
    server.stop()
