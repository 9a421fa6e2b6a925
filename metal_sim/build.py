"""Compile translated kernels with g++, once each."""

import hashlib
import os
import platform
import subprocess
import tempfile
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).with_name("cpp")
HEADER = "metal_stdlib.h"

# No contraction, so that each operation rounds as it is written; variables without a value hold a pattern.
_FLAGS = ["-std=c++17", "-O1", "-ffp-contract=off", "-ftrivial-auto-var-init=pattern", "-w", "-march=native", "-fPIC"]
_SANITIZED = ["-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


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
    sources = "".join(file.read_text() for file in sorted(SOURCES.iterdir()))
    return compiler + sources + platform.machine() + str(_FLAGS)


def _compile(output: Path, *arguments: str | Path) -> None:
    """g++ writes `output`: whole or not at all, also when two runs build it at once."""
    with tempfile.TemporaryDirectory(dir=_folder()) as scratch:
        made = Path(scratch, "output")
        done = subprocess.run(["g++", *_FLAGS, *arguments, "-o", made], capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompileError(done.stderr)
        output.parent.mkdir(exist_ok=True)
        made.replace(output)


@cache
def _shared(*flags: str) -> tuple[Path, list[Path]]:
    """What builds with the same flags share: a folder with the header, parsed, and the machine's object files."""
    folder = _folder() / hashlib.sha256("\0".join([_version(), *flags]).encode()).hexdigest()[:24]
    names = ["fiber", "machine", "sanitized_main"] if flags else ["fiber", "machine"]
    objects = {folder / f"{name}.o": SOURCES / f"{name}.cpp" for name in names}
    for output, source in objects.items():
        if not output.exists():
            _compile(output, *flags, "-c", source)
    parsed = folder / f"{HEADER}.gch"  # where g++ looks for it first
    if not parsed.exists():
        _compile(parsed, *flags, "-x", "c++-header", SOURCES / HEADER)
    return folder, list(objects)


def build(source: str, *, sanitize: bool = False) -> Path:
    """A shared library with `tqsim_dispatch`; or a sanitized program that runs it on a file.

    Raises:
        CompileError: g++ refused the text.

    """
    flags = _SANITIZED if sanitize else []
    shared, objects = _shared(*flags)
    result = shared / hashlib.sha256(source.encode()).hexdigest()[:24]
    if not result.exists():
        text = shared / f"{result.name}.{os.getpid()}.cpp"
        text.write_text(source)
        kind = [] if sanitize else ["-shared"]
        try:
            _compile(result, *flags, *kind, f"-I{shared}", f"-I{SOURCES}", text, *objects)
        finally:
            text.unlink()
    return result
