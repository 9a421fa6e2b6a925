"""Its place puts `cases` and `covering` on the path of the tests in the folders below."""

import pytest


@pytest.fixture(autouse=True)
def _cache_folder():
    """The simulator's builds are kept from one run of the tests to the next."""
