"""Start and watch processes under test."""

import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

LIMIT = 240  # seconds after which a process is taken for stuck


@contextmanager
def killed_on_failure(process: subprocess.Popen) -> Iterator[None]:
    """Kill the process if the block raises."""
    try:
        yield
    except BaseException:
        process.kill()
        process.wait()
        raise


@contextmanager
def hangup_set_to(handler: signal.Handlers) -> Iterator[None]:
    """Start processes with SIGHUP as in a terminal (SIG_DFL) or under nohup (SIG_IGN), however the tests run."""
    previous = signal.signal(signal.SIGHUP, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, previous)


def read_until(stream: int, mark: str, text: str = "") -> str:
    """Return what a pipe or a terminal shows up to and including `mark`; fail if it ends or takes too long."""
    deadline = time.monotonic() + LIMIT
    while mark not in text:
        ready, _, _ = select.select([stream], [], [], max(0, deadline - time.monotonic()))
        assert ready, f"no {mark!r} in {text!r}"
        more = os.read(stream, 65536)
        assert more, f"no {mark!r} in {text!r}"
        text += more.decode(errors="replace")
    return text
