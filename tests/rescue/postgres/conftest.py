import postgres_server
import pytest

from rescue_svc.opening import open_all
from rescue_svc.settings import load_settings


@pytest.fixture(scope="module")
def own():
    """A server that these tests may kill."""
    if lacking := postgres_server.missing():
        pytest.skip(lacking)
    server = postgres_server.PostgresServer()
    yield server
    server.stop()


@pytest.fixture
def opening():
    """Open stores, which are closed with the test; return a store and its index."""
    made = []

    def opened(url, model="test-1", dim=4, **settings):
        made.append(open_all(load_settings(store=url, **settings), model, dim))
        return made[-1]

    yield opened
    for store, _ in made:
        store.close()
