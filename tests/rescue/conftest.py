import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import postgres_server
import pytest

from rescue_svc.store import Index, Store

from .harness import LocalService, Server, open_store


@pytest.fixture(scope="session", autouse=True)
def _no_settings_of_the_service() -> Iterator[None]:
    """Ignore the settings of the user's own service."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("RESCUE_")]:
            patch.delenv(name)
        yield


@pytest.fixture(params=[40, pytest.param(1, marks=pytest.mark.full)], ids=["a fortieth", "all"])
def times(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """Return the full count in `make test-full`, a fortieth of it in `make test`."""
    return lambda count: max(1, count // request.param)


def running_postgres(**settings: str) -> Iterator[postgres_server.PostgresServer]:
    if lacking := postgres_server.missing():
        pytest.skip(lacking)
    server = postgres_server.PostgresServer(**settings)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def postgres() -> Iterator[postgres_server.PostgresServer]:
    """Run a server in which each test makes its own databases."""
    yield from running_postgres(fsync="off")


@pytest.fixture(scope="module")
def killable() -> Iterator[postgres_server.PostgresServer]:
    """Run a server that tests may kill."""
    yield from running_postgres()


@pytest.fixture
def opening() -> Iterator[Callable[..., tuple[Store, Index]]]:
    """Return a function that opens a store and its index; all are closed after the test."""
    with ExitStack() as stack:

        def opened(store: str | None = None, **options: Any) -> tuple[Store, Index]:
            opened_store, index = open_store(store=store, **options)
            stack.callback(opened_store.close)
            return opened_store, index

        yield opened


class Storage:
    """Where services store their data: in their folders, or in PostgreSQL with one database per folder."""

    def __init__(self, server: postgres_server.PostgresServer | None) -> None:
        self.server = server

    def __call__(self, data_dir: Path) -> dict[str, str]:
        """Return the settings of a service."""
        return {"store": self.server.database(data_dir)} if self.server else {}

    def files(self, data_dir: Path) -> list[Path]:
        """Return every file that may contain a service's data."""
        folder, databases_of_others = data_dir, set()
        if self.server:
            folder, oid = self.server.data, "SELECT oid FROM pg_database WHERE datname = current_database()"
            ((number,),) = self.server.sql(oid, self(data_dir)["store"])
            databases_of_others = {path for path in (folder / "base").iterdir() if path.name != str(number)}
        return [path for path in folder.rglob("*") if path.is_file() and not databases_of_others & {*path.parents}]


@pytest.fixture(scope="session")
def storage(request: pytest.FixtureRequest) -> Storage:
    """Return SQLite, with EACH_STORE then PostgreSQL."""
    on_postgres = getattr(request, "param", "sqlite") == "postgres"
    return Storage(request.getfixturevalue("postgres") if on_postgres else None)


def starting(kind: Any, end: Callable[[Any], None]) -> Any:
    """Return a fixture that starts services in `tmp_path / 'data'` or another folder and ends them with the test."""

    @pytest.fixture
    def start(tmp_path: Path, storage: Storage) -> Iterator[Callable[..., Any]]:
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
def shared(tmp_path_factory: pytest.TempPathFactory, storage: Storage) -> Iterator[LocalService]:
    """Run one service for tests that only add sessions of their own."""
    folder = tmp_path_factory.mktemp("shared") / "data"
    service = LocalService(folder, **storage(folder))
    yield service
    service.stop()
