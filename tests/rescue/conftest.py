import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import postgres_server
import pytest

from rescue_svc.postgres.connections import SCHEMA

from .harness import LocalService, Server


@pytest.fixture(scope="session", autouse=True)
def _no_settings_of_the_service() -> Iterator[None]:
    """Ignore the settings of the user's own service."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("RESCUE_")]:
            patch.delenv(name)
        yield


@pytest.fixture(params=[10, pytest.param(1, marks=pytest.mark.full)], ids=["a tenth", "all"])
def times(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """Return the full count in `make test-full`, a tenth of it in `make test`."""
    return lambda count: count // request.param


@pytest.fixture(scope="session")
def postgres() -> Iterator[postgres_server.PostgresServer]:
    """Run a server in which each test makes its own databases."""
    if lacking := postgres_server.missing():
        pytest.skip(lacking)
    server = postgres_server.PostgresServer(fsync="off")
    yield server
    server.stop()


class Sqlite:
    """Services that store their data in folders."""

    def __call__(self, data_dir: Path) -> dict[str, str]:
        """Return the settings of a service."""
        return {}

    def files(self, data_dir: Path) -> list[Path]:
        """Return every file that may contain a service's data."""
        return [path for path in data_dir.rglob("*") if path.is_file()]

    def change(self, data_dir: Path, statement: str) -> None:
        """Run a statement directly on the database."""
        with closing(sqlite3.connect(data_dir / "rescue.db")) as database, database:
            database.execute(statement)

    def dims(self, service: LocalService, session: str) -> list[int]:
        """Return the dimensions of each stored vector."""
        store, worker = service.service.store, service.service.embedder
        return [len(row) for row in store.vectors(store.session(session).id, worker.model, 0, worker.dim()).vectors]


class Postgres(Sqlite):
    """Services that store their data in PostgreSQL, in one database per data folder."""

    def __init__(self, server: postgres_server.PostgresServer) -> None:
        self.server = server

    def __call__(self, data_dir: Path) -> dict[str, str]:
        return {"store": self.server.database(data_dir)}

    def files(self, data_dir: Path) -> list[Path]:
        oid = "SELECT oid FROM pg_database WHERE datname = current_database()"
        ((number,),) = self.server.sql(oid, self(data_dir)["store"])
        others = {path for path in (self.server.data / "base").iterdir() if path.name != str(number)}
        return [path for path in super().files(self.server.data) if not others & {*path.parents}]

    def change(self, data_dir: Path, statement: str) -> None:
        self.server.sql(f"SET search_path = {SCHEMA}; {statement}", self(data_dir)["store"])

    def dims(self, service: LocalService, session: str) -> list[int]:
        table = f"{SCHEMA}.vectors_{service.service.store.session(session).id}"
        rows = self.server.sql(f"SELECT vector_dims(vector) FROM {table}", self(service.data_dir)["store"])
        return [dims for (dims,) in rows]


@pytest.fixture(scope="session")
def storage(request: pytest.FixtureRequest) -> Sqlite:
    """Return where services store their data: SQLite, with EACH_STORE then PostgreSQL."""
    on_postgres = getattr(request, "param", "sqlite") == "postgres"
    return Postgres(request.getfixturevalue("postgres")) if on_postgres else Sqlite()


def starting(kind: Any, end: Callable[[Any], None]) -> Any:
    """Return a fixture that starts services in `tmp_path / 'data'` or another folder and ends them with the test."""

    @pytest.fixture
    def start(tmp_path: Path, storage: Sqlite) -> Iterator[Callable[..., Any]]:
        with ExitStack() as stack:

            def started(data_dir: Path = tmp_path / "data", **settings: object) -> Any:
                service = kind(data_dir, **storage(data_dir) | settings)
                stack.callback(end, service)
                return service

            yield started

    return start


start_service = starting(LocalService, LocalService.stop)
start_server = starting(Server, Server.kill)  # in processes of their own


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, storage: Sqlite) -> Iterator[LocalService]:
    """Run one service for tests that only add sessions of their own."""
    folder = tmp_path_factory.mktemp("shared") / "data"
    service = LocalService(folder, **storage(folder))
    yield service
    service.stop()
