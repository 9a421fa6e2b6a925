"""The CPU kernels without Python: sanitizers find nothing, and other vectors and processors compute the same."""

import os
import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from mlx_tq.kernels.cpu import build

PROGRAM = Path(__file__).with_name("cpu_program.cpp")
NEON = ("aarch64-linux-gnu-g++", "qemu-aarch64")
SANITIZERS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
    "thread": ["-fsanitize=thread"],
}
needs_neon = pytest.mark.skipif(
    not all(map(shutil.which, NEON)), reason="no cross compiler or emulator for ARM: run `make neon`"
)


def run(folder: Path, *options: str, compiler: str | None = None, emulator: tuple[str, ...] = (), threads: int = 2):
    """Compile kernels and program with options, run it, and return the codes and the numbers that it computed."""
    common = [compiler or build.find_compiler(), "-std=c++17", "-O1", "-g", "-w", *options]
    objects = [str(folder / f"{name}.o") for name in [*build.CONTRACTED, "program"]]
    for (name, contracted), output in zip([*build.CONTRACTED.items(), ("program", "off")], objects, strict=True):
        source = PROGRAM if name == "program" else build.SOURCES / f"{name}.cpp"
        flags = [f"-ffp-contract={contracted}", f"-I{build.SOURCES}"]
        subprocess.run([*common, *flags, "-c", str(source), "-o", output], check=True)
    program, codes, numbers = (str(folder / name) for name in ("program", "codes", "numbers"))
    subprocess.run([*common, *objects, "-pthread", "-o", program], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # a sanitizer is first
    command = [*emulator, program, codes, numbers, str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    return Path(codes).read_bytes(), np.fromfile(numbers, np.float32)


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    """Codes and numbers of this machine, whose kernels the other tests compare with the codec and with float64."""
    return run(tmp_path_factory.mktemp("native"), "-march=native")


def check(result, expected):
    assert result[0] == expected[0]
    assert len(result[1]) == len(expected[1])
    largest = np.abs(expected[1]).max()  # sums of up to 740 products in another order
    assert np.abs(result[1] - expected[1]).max() <= 8 * 2**-24 * largest


@pytest.mark.full
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_sanitizers(native, tmp_path, sanitizer):
    check(run(tmp_path, "-march=native", *SANITIZERS[sanitizer], threads=4), native)


@pytest.mark.full
@pytest.mark.skipif(platform.machine() != "x86_64", reason="vectors of an x86-64 processor")
@pytest.mark.parametrize("processor", ["x86-64", "haswell"])
def test_narrower_vectors(native, tmp_path, processor):
    options = [*SANITIZERS["address"], f"-march={processor}"]
    check(run(tmp_path, *options), native)


@needs_neon
@pytest.mark.full
def test_neon(native, tmp_path):
    compiler, emulator = NEON
    check(run(tmp_path, "-static", compiler=compiler, emulator=(emulator,)), native)


@pytest.mark.full
def test_one_thread_computes_the_same_bits(native, tmp_path):
    codes, numbers = run(tmp_path, "-march=native", threads=1)
    assert codes == native[0]
    assert np.array_equal(numbers, native[1])
