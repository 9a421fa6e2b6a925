"""Processes under test."""

import os
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

LIMIT = 240  # seconds after which a process is taken for stuck


@contextmanager
def killed_on_failure(process: subprocess.Popen) -> Iterator[None]:
    """End a process that did not get as far as it should."""
    try:
        yield
    except BaseException:
        process.kill()
        process.wait()
        raise


def read_until(stream: int, mark: str, said: str = "") -> str:
    """What a pipe or a terminal says up to and including `mark`; fails when it ends or takes too long."""
    deadline = time.monotonic() + LIMIT
    while mark not in said:
        ready, _, _ = select.select([stream], [], [], max(0, deadline - time.monotonic()))
        assert ready, f"no {mark!r} in {said!r}"
        more = os.read(stream, 65536)
        assert more, f"no {mark!r} in {said!r}"
        said += more.decode(errors="replace")
    return said
