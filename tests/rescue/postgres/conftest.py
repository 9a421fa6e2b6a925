import postgres_server
import pytest

from rescue_svc.opening import open_all
from rescue_svc.settings import load_settings


@pytest.fixture(scope="module")
def killable():
    """Run a server that tests may kill."""
    if lacking := postgres_server.missing():
        pytest.skip(lacking)
    server = postgres_server.PostgresServer()
    yield server
    server.stop()


@pytest.fixture
def opening():
    """Return a function that opens a store and its index; all are closed after the test."""
    made = []

    def opened(url, model="test-1", dim=4, **settings):
        made.append(open_all(load_settings(store=url, **settings), model, dim))
        return made[-1]

    yield opened
    for store, _ in made:
        store.close()
