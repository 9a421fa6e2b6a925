"""Compiles translated kernels with g++, once each."""

import hashlib
import os
import platform
import subprocess
import tempfile
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).with_name("cpp")
HEADER = "metal_stdlib.h"

# No contraction, so that each operation rounds as written; uninitialized variables hold a pattern.
_FLAGS = ["-std=c++17", "-O1", "-ffp-contract=off", "-ftrivial-auto-var-init=pattern", "-w", "-march=native", "-fPIC"]
_SANITIZED = ["-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


class CompileError(Exception):
    """The compiler rejected the kernel's text; has its message."""


@cache
def _folder() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME", tempfile.gettempdir())) / f"mlx_tq-metal-sim-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


@cache
def _version() -> str:
    compiler = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout
    sources = "".join(file.read_text() for file in sorted(SOURCES.iterdir()))
    return compiler + sources + platform.machine() + str(_FLAGS)


def _compile(output: Path, *arguments: str | Path) -> None:
    with tempfile.TemporaryDirectory(dir=_folder()) as scratch:
        built = Path(scratch, "output")
        done = subprocess.run(["g++", *_FLAGS, *arguments, "-o", built], capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompileError(done.stderr)
        output.parent.mkdir(exist_ok=True)
        built.replace(output)  # atomically, because two runs may build it at the same time


@cache
def _shared(*flags: str) -> tuple[Path, list[Path]]:
    """Build what kernels with the same flags share: a folder with the precompiled header, and the object files."""
    folder = _folder() / hashlib.sha256("\0".join([_version(), *flags]).encode()).hexdigest()[:24]
    names = ["fiber", "machine", "sanitized_main"] if flags else ["fiber", "machine"]
    objects = {folder / f"{name}.o": SOURCES / f"{name}.cpp" for name in names}
    for output, source in objects.items():
        if not output.exists():
            _compile(output, *flags, "-c", source)
    precompiled = folder / f"{HEADER}.gch"  # g++ looks for this file first
    if not precompiled.exists():
        _compile(precompiled, *flags, "-x", "c++-header", SOURCES / HEADER)
    return folder, list(objects)


def build(source: str, *, sanitize: bool = False) -> Path:
    """Build a shared library with `tqsim_dispatch`, or a sanitized program that runs it on a file."""
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
