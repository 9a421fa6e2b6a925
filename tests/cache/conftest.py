"""The caches are driven by hand here; the attention that they need is open throughout."""

import pytest

from mlx_tq.integration.patches import patch_attention


@pytest.fixture(autouse=True, scope="package")
def _attention():
    with patch_attention():
        yield
