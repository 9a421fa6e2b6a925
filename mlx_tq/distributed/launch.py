"""The place of this process among those that `mlx.launch` started, and its end when `mlx.launch` ends it."""

import os
import signal
import sys
import threading
from collections.abc import Mapping

_RANK_VARIABLE = "MLX_RANK"  # which mlx.launch sets with each of its backends
_HAS_WRITTEN = threading.Lock()  # acquired by the first line that says why the process ends


def is_launched(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether `mlx.launch` started this process; does not load mlx."""
    return _RANK_VARIABLE in environ


def launched_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Return the rank of this process, which is 0 unless `mlx.launch` started it; does not load mlx."""
    return int(environ.get(_RANK_VARIABLE, "0"))


def write_last_line(line: str) -> None:
    """Write a line to stderr unless one was written before."""
    if _HAS_WRITTEN.acquire(blocking=False):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def exit_now(line: str) -> None:
    """Write the last line and end the process immediately, from any thread."""
    write_last_line(line)
    os._exit(1)


def exit_on_sigterm(line: str) -> None:
    """From now on, end the process with `line` on SIGTERM, even while its main thread is blocked in a collective.

    A main thread that waits for a rank that is gone runs no Python signal handler. So the signal writes a byte into a
    pipe, from any thread that receives it, and a thread that reads the pipe ends the process.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.signal(signal.SIGTERM, lambda *_: None)  # without a handler, Python writes no byte
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def wait() -> None:
        while os.read(read_end, 1) != bytes([signal.SIGTERM]):
            pass
        exit_now(line)

    threading.Thread(target=wait, name="exit-on-sigterm", daemon=True).start()
