"""The worked examples of CONTRIBUTING.md run as they stand."""

import re
import shutil
import sys

import pytest

from mlx_tq.kernels import gpu

from .pages import ROOT, blocks, run

PAGE = ROOT / "CONTRIBUTING.md"


def code(language):
    return [block.code for block in blocks(PAGE) if block.language == language]


POLICY = """
from types import SimpleNamespace
import mlx.core as mx
layer = SimpleNamespace(value_norms=lambda count: mx.array([[1.0, 3.0], [2.0, 4.0]]))
tokens = SimpleNamespace(positions=np.arange(2), layers=[layer])
assert ValueNorm().score(tokens).tolist() == [1.5, 3.5]
"""
FORMAT = "assert not mx.any(codec.decode(codec.encode(mx.zeros((3, 128)))))"


@pytest.mark.parametrize(("first", "check", "shown"), [(0, POLICY, r"\S"), (2, FORMAT, "66 bytes, error 0.0")])
def test_the_policy_and_the_format(tmp_path, first, check, shown):
    program = ["import mlx_tq, mlx_tq.codec", *code("python")[first : first + 2], check]
    done = run([sys.executable, "-c", "\n".join(program)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.match(shown, done.stdout)


def test_the_kernel(tmp_path, monkeypatch):
    (text,) = code("metal")
    folder = tmp_path / "metal"
    shutil.copytree(ROOT / "metal", folder)
    (folder / "scale_rows.metal").write_text(text)
    monkeypatch.setattr(gpu, "kernels_folder", lambda: folder)
    names = {}
    for program in code("python")[4:6]:
        exec(program, names)
    broken = text.replace("* row_factors[row]", "+ row_factors[row]")
    (folder / "scale_rows.metal").write_text(broken)
    gpu.kernel_text.cache_clear()
    gpu.compile_kernel.cache_clear()
    with pytest.raises(AssertionError):
        exec(code("python")[5], names)
    gpu.kernel_text.cache_clear()
    gpu.compile_kernel.cache_clear()
