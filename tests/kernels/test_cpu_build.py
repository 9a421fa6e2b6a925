"""The CPU kernels are compiled once; where that fails, the reference implementation runs, and one line says why."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

ATTEND = """
    import warnings
    import mlx.core as mx
    from mlx_tq.codec import CodecOptions, RowLayout, get_format
    from mlx_tq.kernels import backend
    from mlx_tq.kernels.encode import encode
    layout = RowLayout(*(get_format("tq4").codec(64, CodecOptions(), mx.float32) for _ in range(2)))
    x = mx.random.normal((1, 2, 100, 64))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = [encode(x, x, layout).rows for _ in range(2)]
    mx.eval(rows)
    print(backend.current(), len(caught), *(str(warning.message) for warning in caught))
"""


def run(folder: Path, text: str = ATTEND, **environment: str) -> str:
    """Run a program with its cache in a folder, and return the last line that it prints."""
    variables = {**os.environ, "XDG_CACHE_HOME": str(folder), **environment}
    command = [sys.executable, "-c", textwrap.dedent(text)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def make_compiler(folder: Path, script: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="module")
def quick_compiler(tmp_path_factory):
    """Return a compiler that does not optimize, which takes a quarter of the time."""
    return make_compiler(tmp_path_factory.mktemp("compiler"), 'exec c++ "$@" -O0')


@pytest.fixture(scope="module")
def cache(tmp_path_factory, quick_compiler):
    folder = tmp_path_factory.mktemp("cache")
    assert run(folder, CXX=quick_compiler) == "cpu 0"
    return folder


def libraries(folder):
    return list((folder / "mlx_tq" / "kernels").glob("*.so"))


def test_they_are_compiled_once(cache, tmp_path):
    (library,) = libraries(cache)
    before = library.stat().st_mtime_ns
    real = make_compiler(tmp_path, 'case "$*" in *-c*) exit 9;; *) exec c++ "$@";; esac')
    assert run(cache, CXX=real) == "cpu 0"
    assert libraries(cache) == [library]
    assert library.stat().st_mtime_ns == before
    assert (cache / "mlx_tq" / "kernels").stat().st_mode & 0o77 == 0


@pytest.mark.full
def test_a_damaged_library_is_compiled_again(cache, quick_compiler, tmp_path):
    shutil.copytree(cache, tmp_path, dirs_exist_ok=True)
    (library,) = libraries(tmp_path)
    library.write_bytes(library.read_bytes()[:1000])
    assert run(tmp_path, CXX=quick_compiler) == "cpu 0"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 'fatal: no disk' >&2; exit 1", "cannot be compiled by .*: fatal: no disk"),
        ('case "$*" in *-c*) echo oh >&2; exit 1;; *) exec c++ "$@";; esac', "cannot be compiled by .*: oh"),
    ],
)
def test_a_compiler_that_fails(tmp_path, script, expected):
    line = run(tmp_path, CXX=make_compiler(tmp_path, script))
    assert line.startswith("reference 1 the CPU kernels ")
    assert re.search(expected, line)


def test_a_compiler_that_hangs(tmp_path):
    text = ATTEND.replace("layout =", "from mlx_tq.kernels.cpu import build\n    build._TIMEOUT = 0.5\n    layout =")
    started = time.monotonic()
    line = run(tmp_path, text, CXX=make_compiler(tmp_path, "sleep 60"))
    assert line.startswith("reference 1 the CPU kernels cannot be compiled: ")
    assert "timed out" in line
    assert time.monotonic() - started < 30


def test_a_library_that_cannot_be_loaded(tmp_path):
    """As from a folder without permission to run programs."""
    script = 'while [ $# -gt 0 ]; do [ "$1" = -o ] && echo no library > "$2"; shift; done'
    line = run(tmp_path, CXX=make_compiler(tmp_path, script))
    assert line.startswith("reference 1 the compiled CPU kernels in ")
    assert "cannot be loaded" in line


def test_no_compiler(tmp_path):
    line = run(tmp_path, PATH="/nowhere", CXX="/nowhere/c++")
    assert line.startswith("reference 1 no C++ compiler: c++, g++ or clang++ has to be on PATH")


def test_a_folder_that_cannot_be_written_to(tmp_path):
    file = tmp_path / "file"
    file.touch()
    assert "Set XDG_CACHE_HOME to one that can be written to" in run(file)
    (tmp_path / "mlx_tq" / "kernels").mkdir(parents=True)
    (tmp_path / "mlx_tq" / "kernels").chmod(0o777)
    assert "Run chmod 700 on it" in run(tmp_path)


def test_a_forked_process_has_threads_of_its_own(cache):
    text = (
        ATTEND
        + """
    import os
    import numpy as np
    expected = np.array(rows[0])
    for _ in range(3):
        child = os.fork()
        if child == 0:  # mlx itself cannot evaluate here
            os._exit(int((np.array(encode(x, x, layout).rows) != expected).any()))
        assert os.waitpid(child, 0)[1] == 0
    print("ok")
    """
    )
    assert run(cache, text) == "ok"


def test_threads_that_call_at_once_get_the_same(cache):
    text = (
        ATTEND
        + """
    from concurrent.futures import ThreadPoolExecutor
    import numpy as np
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: np.array(encode(x, x, layout).rows), range(64)))
    assert all((result == np.array(rows[0])).all() for result in results)
    print("ok")
    """
    )
    assert run(cache, text) == "ok"


def test_idle_threads_use_no_time(cache):
    text = (
        ATTEND
        + """
    import time
    before, _ = time.process_time(), time.sleep(1.0)
    print(time.process_time() - before < 0.1)
    """
    )
    assert run(cache, text) == "True"
