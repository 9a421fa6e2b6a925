"""Compiles the CPU kernels once for this machine, and loads them."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from mlx_tq.errors import KernelUnavailableError
from mlx_tq.files import cache_folder
from mlx_tq.kernels.execution_record import record

SOURCES = Path(__file__).parent
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-w")
# Whether sums of products may be contracted. Codes are the same bits on every machine, so their sums may not.
CONTRACTED = {"attend": "fast", "score": "fast", "recall_score": "fast", "encode": "off", "pool": "off"}
_TIMEOUT = 60  # seconds of a compilation, which takes 2 to 4


def run_kernel(name: str, call: ctypes.Structure) -> None:
    record(name)
    getattr(load_library(), f"tq_{name}")(ctypes.byref(call))


def announce_kernel() -> None:
    """Wake the threads for a kernel that is called within microseconds."""
    load_library().tq_announce()


@cache
def load_library() -> ctypes.CDLL:
    """Return the compiled kernels, from the user's cache folder if they are there."""
    compiler, folder = find_compiler(), kernel_folder()
    name = f"kernels-{_key(compiler)}"
    try:
        for library in folder.glob(f"{name}-*.so"):
            if library.name == f"{name}-{_digest(library)}.so":
                return ctypes.CDLL(str(library))
            library.unlink(missing_ok=True)  # it is damaged, and loading it may end the process
        return ctypes.CDLL(str(_compile(compiler, folder, name)))
    except OSError as error:  # such as a folder from which no program may run
        raise KernelUnavailableError(f"the compiled CPU kernels in {folder} cannot be loaded: {error}.") from error


def find_compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    raise KernelUnavailableError("no C++ compiler: c++, g++ or clang++ has to be on PATH, or CXX has to name one.")


def kernel_folder() -> Path:
    """Return the folder of compiled kernels, which only its owner may write to."""
    folder = cache_folder() / "kernels"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise KernelUnavailableError(
            f"compiled CPU kernels have no folder: {error}. Set XDG_CACHE_HOME to one that can be written to."
        ) from error
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise KernelUnavailableError(
            f"others can write to {folder}, where compiled CPU kernels are. Run chmod 700 on it."
        )
    return folder


def _key(compiler: str) -> str:
    texts = [file.read_text(encoding="utf-8") for file in sorted(SOURCES.iterdir()) if file.suffix in (".h", ".cpp")]
    version = _run(compiler, "--version")
    parts = [version, platform.machine(), _instructions(), *_FLAGS, str(CONTRACTED), *texts]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _instructions() -> str:
    """Return the instruction sets of the processor, on which -march=native depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features"))}))


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _compile(compiler: str, folder: Path, name: str) -> Path:
    try:
        with tempfile.TemporaryDirectory(dir=folder) as scratch, ThreadPoolExecutor() as pool:

            def compile_one(name: str) -> str:
                output, contracted = f"{scratch}/{name}.o", f"-ffp-contract={CONTRACTED[name]}"
                _run(compiler, *_FLAGS, contracted, "-c", str(SOURCES / f"{name}.cpp"), "-o", output)
                return output

            objects = list(pool.map(compile_one, CONTRACTED))
            built = Path(scratch, "kernels.so")
            _run(compiler, "-shared", *objects, "-o", str(built), "-pthread")
            return built.replace(folder / f"{name}-{_digest(built)}.so")  # in one step: others may build it too
    except OSError as error:
        raise KernelUnavailableError(
            f"compiled CPU kernels cannot be saved: {error}. Set XDG_CACHE_HOME to a folder that can be written to."
        ) from error


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT)  # noqa: S603 - a compiler
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelUnavailableError(f"the CPU kernels cannot be compiled: {error}.") from error
    if done.returncode:
        message = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[0]
        raise KernelUnavailableError(f"the CPU kernels cannot be compiled by {command[0]}: {message}.")
    return done.stdout
