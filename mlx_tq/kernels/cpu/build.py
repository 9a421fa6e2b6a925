"""Compiles the CPU kernels once for this machine, and loads them."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from mlx_tq.errors import KernelUnavailableError

SOURCES = Path(__file__).parent
_FLAGS = ["-std=c++17", "-O3", "-march=native", "-fPIC", "-w"]
# Sums of products may be contracted, but for codes, which are the same bits on every machine.
_CONTRACTED = {"attend": "fast", "score": "fast", "recall_score": "fast", "encode": "off", "pool": "off"}
_TIMEOUT = 300  # seconds


class CompilerError(KernelUnavailableError):
    """The CPU kernels could not be compiled."""


@cache
def load_library() -> ctypes.CDLL:
    """Return the compiled kernels, from the user's cache folder where they are already there."""
    compiler = find_compiler()
    folder = cache_folder()
    library = folder / f"kernels-{_key(compiler)}.so"
    if not library.exists():
        _compile(compiler, library)
    try:
        return ctypes.CDLL(str(library))
    except OSError:  # damaged
        library.unlink()
        _compile(compiler, library)
        return ctypes.CDLL(str(library))


def find_compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise CompilerError("no C++ compiler was found (c++, g++ or clang++). Install one, or set CXX to its path.")


def cache_folder() -> Path:
    """Return the folder of compiled kernels, which only its owner can read or write."""
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "mlx_tq"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner, mode = folder.stat().st_uid, folder.stat().st_mode
    except OSError as error:
        raise CompilerError(f"the folder for compiled kernels cannot be made: {error}. Set XDG_CACHE_HOME.") from error
    if owner != os.getuid() or mode & 0o022:
        raise CompilerError(
            f"{folder}, where compiled kernels are kept, can be written by others. Run chmod 700 on it."
        )
    return folder


def _key(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    texts = [file.read_text() for file in sorted(SOURCES.iterdir()) if file.suffix in (".h", ".cpp")]
    parts = [version, platform.machine(), _processor(), *_FLAGS, str(_CONTRACTED), *texts]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """Return what -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features"))}))


def _compile(compiler: str, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        objects = []
        for name, contracted in _CONTRACTED.items():
            objects.append(str(Path(scratch, f"{name}.o")))
            _run(
                compiler, *_FLAGS, f"-ffp-contract={contracted}", "-c", str(SOURCES / f"{name}.cpp"), "-o", objects[-1]
            )
        built = Path(scratch, "kernels.so")
        _run(compiler, "-shared", *objects, "-o", str(built), "-pthread")
        built.replace(library)  # in one step: another process may build it too


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompilerError(f"the CPU kernels could not be compiled: {error}.") from error
    if done.returncode:
        lines = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()
        raise CompilerError(f"the CPU kernels could not be compiled by {command[0]}: {lines[0]}")
