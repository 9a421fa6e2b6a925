"""The worked examples of CONTRIBUTING.md run as they are."""

import shutil
import sys

import pytest

from mlx_tq.kernels import gpu

from .pages import ROOT, blocks, run

PAGE = ROOT / "CONTRIBUTING.md"
PYTHON = blocks(PAGE, "python")
POLICY = """
from types import SimpleNamespace
import mlx.core as mx
layer = SimpleNamespace(value_norms=lambda count: mx.array([[1.0, 3.0], [2.0, 4.0]]))
tokens = SimpleNamespace(positions=np.arange(2), layers=[layer])
assert ValueNorm().score(tokens).tolist() == [1.5, 3.5]
"""
FORMAT = "assert not mx.any(codec.decode(codec.encode(mx.zeros((3, 128)))))"


@pytest.mark.full
@pytest.mark.parametrize(
    ("program", "output"),
    [([*PYTHON[:2], POLICY], ""), ([*PYTHON[2:4], FORMAT], "66 bytes, error 0.0")],
    ids=["policy", "format"],
)
def test_the_policy_and_the_format(tmp_path, program, output):
    done = run([sys.executable, "-c", "\n".join(program)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith(output)
    assert done.stdout.strip()


@pytest.mark.full
def test_the_kernel(tmp_path, monkeypatch):
    (text,) = blocks(PAGE, "metal")
    folder = tmp_path / "metal"
    shutil.copytree(ROOT / "metal", folder)
    monkeypatch.setattr(gpu, "kernels_folder", lambda: folder)

    def write(kernel):
        (folder / "scale_rows.metal").write_text(kernel)
        gpu.kernel_text.cache_clear()
        gpu.compile_kernel.cache_clear()

    names = {}
    try:
        write(text)
        for program in PYTHON[4:6]:
            exec(program, names)
        write(text.replace("* row_factors[row]", "+ row_factors[row]"))
        with pytest.raises(AssertionError):
            exec(PYTHON[5], names)
    finally:
        write(text)
