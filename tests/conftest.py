"""Fixtures of several folders: the embedded model, loaded once, and a shell without settings of mlx_tq."""

import os
import signal
import subprocess
from contextlib import ExitStack

import mlx.core as mx
import pytest
from hypothesis import Phase, settings
from kernel_cache import make_cache_folder

from mlx_tq.models import load


def pytest_configure(config):
    """Let Ctrl-C work also in the background of a shell that ignores it, and no property fail on a busy machine.

    `make test` tries fewer examples of a property.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    phases = [phase for phase in Phase if phase is not Phase.shrink or "NO_SHRINKING" not in os.environ]
    examples = 40 if config.option.markexpr == "not full" else 100
    settings.register_profile("tests", max_examples=examples, deadline=None, phases=phases)
    settings.load_profile("tests")


@pytest.fixture(scope="session")
def embedded():
    return load()


@pytest.fixture(scope="session")
def exact():
    """Load the model in float32: greedy choices then do not hang on rounding."""
    model, tokenizer = load()
    model.set_dtype(mx.float32)
    return model, tokenizer


@pytest.fixture(scope="module")
def browser():
    from browser import chromium  # playwright, which few tests need

    with chromium() as started:
        yield started


@pytest.fixture
def open_page(browser):
    from browser import pages  # playwright

    with pages(browser) as opened:
        yield opened


@pytest.fixture(scope="module")
def compiled():
    """Enable `mx.compile`, which `make test` disables: mlx's CPU calls a C++ compiler for every graph, for minutes."""
    mx.enable_compile()
    yield
    if "MLX_DISABLE_COMPILE" in os.environ:
        mx.disable_compile()


@pytest.fixture
def popen():
    """Return `subprocess.Popen`; its processes end with the test, also with one that failed."""
    with ExitStack() as stack:

        def start(*args, **options):
            process = stack.enter_context(subprocess.Popen(*args, **options))
            stack.callback(process.kill)
            return process

        yield start


@pytest.fixture(scope="session")
def _shared_cache_folder(tmp_path_factory):
    return make_cache_folder(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _cache_folder(_shared_cache_folder, monkeypatch):
    """Keep the cache folder of whoever runs the tests as it is, except for compiled kernels."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(_shared_cache_folder))


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch):
    """Ignore the settings of whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith("MLX_TQ_")]:
        monkeypatch.delenv(name)
