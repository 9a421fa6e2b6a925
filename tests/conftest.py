"""What tests of several folders share: the embedded model, loaded once, and a shell without settings of mlx_tq."""

import os

import pytest

from mlx_tq.models import load


@pytest.fixture(scope="session")
def embedded():
    """The model inside the package and its tokenizer."""
    return load()


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch):
    """Whoever runs the tests may have chosen a cache for every day."""
    for name in [name for name in os.environ if name.startswith("MLX_TQ_")]:
        monkeypatch.delenv(name)
