"""Processes under test."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def killed_on_failure(process: subprocess.Popen) -> Iterator[None]:
    """End a process that did not get as far as it should."""
    try:
        yield
    except BaseException:
        process.kill()
        process.wait()
        raise
