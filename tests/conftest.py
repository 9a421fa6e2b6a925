"""What tests of several folders share: the embedded model, loaded once, and a shell without settings of mlx_tq."""

import os
import signal
import subprocess
from contextlib import ExitStack

import pytest

from mlx_tq.models import load


def pytest_configure():
    """Ctrl-C works also where the tests run in the background of a shell that ignores it, which children inherit."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def embedded():
    """The model inside the package and its tokenizer."""
    return load()


@pytest.fixture
def popen():
    """`subprocess.Popen`, whose processes end with the test, also with one that failed."""
    with ExitStack() as stack:

        def start(*args, **options):
            process = stack.enter_context(subprocess.Popen(*args, **options))
            stack.callback(process.kill)
            return process

        yield start


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch):
    """Whoever runs the tests may have chosen a cache for every day."""
    for name in [name for name in os.environ if name.startswith("MLX_TQ_")]:
        monkeypatch.delenv(name)
