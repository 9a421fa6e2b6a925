"""The caches are driven by hand here; the attention that they need is open throughout."""

import pytest

import mlx_tq


@pytest.fixture(autouse=True, scope="package")
def _attention():
    with mlx_tq.attention(None):
        yield
