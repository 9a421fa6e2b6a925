"""Captures the text that mlx would pass to Metal's compiler."""

import ctypes
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

import mlx.core as mx

_PRINTED = re.compile(r"Generated source code for `[^`]*`:\n```\n(.*)\n```", re.S)


class _Captured(Exception):  # noqa: N818 - ends a trace, not an error
    pass


@contextmanager
def _stdout_of_c() -> Iterator[BinaryIO]:
    """Yield a file that gets what C++ code prints inside the `with` block."""
    flush = ctypes.CDLL(None).fflush
    sys.stdout.flush()
    flush(None)
    with tempfile.TemporaryFile() as file:
        stdout = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            yield file
        finally:
            flush(None)
            os.dup2(stdout, 1)
            os.close(stdout)


def capture(kernel: Callable[..., Any], inputs: list[mx.array], **call: Any) -> str:
    """Return what mlx generates for one call of an `mx.fast.metal_kernel`, without mlx's preamble.

    A call needs Metal, unless a function is traced for export; `verbose` then prints the text.
    """

    def traced(*arrays: mx.array) -> None:
        kernel(inputs=list(arrays), verbose=True, **call)
        raise _Captured

    with _stdout_of_c() as file:
        with suppress(_Captured):
            mx.export_function(os.devnull, traced, *inputs)
        file.seek(0)
        printed = file.read().decode()
    match = _PRINTED.search(printed)
    assert match, f"mlx printed no kernel:\n{printed}"
    return match.group(1)
