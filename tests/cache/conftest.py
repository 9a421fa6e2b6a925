"""The caches are driven by hand here; the attention that they need is open throughout."""

import pytest

from mlx_tq.integration.attention import compressed_attention


@pytest.fixture(autouse=True, scope="package")
def _attention():
    with compressed_attention():
        yield
