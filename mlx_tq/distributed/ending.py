"""The end of a rank that `mlx.launch` ends: one line, also where the process waits for a rank that is gone."""

import os
import signal
import sys
import threading

# What it exits with; nobody is asked any more.
_FAILED = 1
_TOLD = threading.Lock()


def tell_end(line: str) -> None:
    """Write a line to stderr, if this process has not said yet why it ends."""
    if _TOLD.acquire(blocking=False):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def end_when_told(line: str) -> None:
    """From now on end at SIGTERM with this line.

    A thread does it: the main one may be inside a sum whose other part never comes, where no Python handler runs. The
    signal wakes the thread by a byte in a pipe, whichever thread of whichever library it reaches.
    """
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGTERM, lambda *_: None)  # what makes Python write the byte
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def wait() -> None:
        while os.read(woken, 1) != bytes([signal.SIGTERM]):
            pass
        end_now(line)

    threading.Thread(target=wait, name="ending", daemon=True).start()


def end_now(line: str) -> None:
    """End at once with this line, from any thread."""
    tell_end(line)
    os._exit(_FAILED)
