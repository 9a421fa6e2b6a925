"""Checks of the process before a command begins, and null devices in place of closed streams."""

import errno
import os
import resource
import sys
import tempfile
from pathlib import Path

_MIN_OPEN_FILES = 4096  # mlx-lm sets this limit when it is imported
_TEMPORARY_VARIABLES = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")  # in C++'s order; Python has another, and skips bad ones
_PROBE_BYTES = 2**16  # as much as a kernel's source


def open_standard_streams() -> None:
    """Open the null device in place of standard streams that the caller has closed, for child processes too.

    The next files would get their descriptors, and mlx takes descriptor 0 for none.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = Path(os.devnull).open(mode)  # noqa: SIM115  is open as long as the process
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def home_error() -> str | None:
    """Return what is wrong with the home folder, or None."""
    try:
        Path.home()
    except RuntimeError:
        return f"HOME is not set, and user {os.getuid()} has no home folder. Set HOME to a folder."
    return None


def is_disk_full(error: Exception) -> bool:
    """Return whether a write failed because the disk, or the user's part of it, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def temporary_folder_error() -> str | None:
    """Return why a temporary file cannot be written, or None."""
    name = next((name for name in _TEMPORARY_VARIABLES if os.environ.get(name)), None)
    folder = os.environ[name] if name else "/tmp"  # noqa: S108  where mlx compiles kernels for CPUs
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE_BYTES))
    except OSError as error:
        remedy = f"{'Free space there, or set' if is_disk_full(error) else 'Set'} {name or 'TMPDIR'} to another folder."
        return f"temporary files cannot be written to {folder} ({error.strerror}). {remedy}"
    return None


def open_files_error() -> str | None:
    """Return why mlx-lm cannot be imported, or None."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= _MIN_OPEN_FILES:
        return None
    remedy = f"in /etc/security/limits.conf, or with `docker run --ulimit nofile={_MIN_OPEN_FILES}`"
    return f"the hard limit of open files is {hard}, and mlx-lm needs {_MIN_OPEN_FILES}. Have it raised {remedy}."
