import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from .harness import Here, Server


@pytest.fixture(scope="session", autouse=True)
def _no_settings_of_the_service() -> Iterator[None]:
    """Whoever runs the tests may have a service of their own."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("RESCUE_")]:
            patch.delenv(name)
        yield


@pytest.fixture(params=[10, pytest.param(1, marks=pytest.mark.full)], ids=["a tenth", "all"])
def times(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """How often a test does what it does: the full count in `make test-full`, a tenth of it in `make test`."""
    return lambda count: count // request.param


def starting(kind: Any, end: Callable[[Any], None]) -> Any:
    """A fixture that starts services on `tmp_path / "data"` or another folder; they end with the test."""

    @pytest.fixture
    def start(tmp_path: Path) -> Iterator[Callable[..., Any]]:
        with ExitStack() as stack:

            def started(data_dir: Path = tmp_path / "data", **settings: object) -> Any:
                service = kind(data_dir, **settings)
                stack.callback(end, service)
                return service

            yield started

    return start


here = starting(Here, Here.stop)
serve = starting(Server, Server.kill)  # in processes of their own


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    """One service for tests that only add sessions of their own."""
    service = Here(tmp_path_factory.mktemp("shared") / "data")
    yield service
    service.stop()
