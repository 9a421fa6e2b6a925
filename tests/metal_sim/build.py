"""Compile translated kernels with g++, once each."""

import hashlib
import os
import platform
import subprocess
import tempfile
from functools import cache
from pathlib import Path

HEADERS = Path(__file__).with_name("cpp")

# No contraction, so that each operation rounds as it is written; variables without a value hold a pattern.
_FLAGS = ["-std=c++17", "-O1", "-ffp-contract=off", "-ftrivial-auto-var-init=pattern", "-w", "-march=native"]
_LIBRARY = ["-shared", "-fPIC"]
_SANITIZED = ["-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-include", "sanitized_main.h"]


class CompileError(Exception):
    """The kernel's text is no valid C++ over the simulator's headers; the compiler's message."""


@cache
def _folder() -> Path:
    """Where builds are kept from one run of the tests to the next."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", tempfile.gettempdir())) / f"mlx_tq-metal-sim-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


@cache
def _version() -> str:
    """What a build depends on besides its own text."""
    compiler = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout
    headers = "".join(file.read_text() for file in sorted(HEADERS.iterdir()))
    return compiler + headers + platform.machine() + str(_FLAGS)


def build(source: str, *, sanitize: bool = False) -> Path:
    """A shared library with `tqsim_dispatch`; or a sanitized program that runs it on a file.

    Raises:
        CompileError: g++ refused the text.

    """
    flags = _SANITIZED if sanitize else _LIBRARY
    name = hashlib.sha256("\0".join([_version(), source, *flags]).encode()).hexdigest()[:24]
    result = _folder() / name
    if not result.exists():
        with tempfile.TemporaryDirectory(dir=_folder()) as scratch:
            text, output = Path(scratch, "kernel.cpp"), Path(scratch, "output")
            text.write_text(source)
            command = ["g++", *_FLAGS, *flags, f"-I{HEADERS}", str(text), "-o", str(output)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise CompileError(done.stderr)
            output.replace(result)  # whole or not at all, also when two runs build it at once
    return result
