import pytest


@pytest.fixture(autouse=True)
def _cache_folder():
    """Keep the simulator's builds from one run of the tests to the next."""
