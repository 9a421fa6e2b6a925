"""The worked examples of CONTRIBUTING.md run as they stand."""

import shutil

import mlx.core as mx
import numpy as np
import pytest

from mlx_tq.kernels import gpu

from .pages import ROOT, blocks

PAGE = ROOT / "CONTRIBUTING.md"


def code(language):
    return [block.code for block in blocks(PAGE) if block.language == language]


def run(*programs):
    names = {}
    for program in programs:
        exec(compile(program, str(PAGE), "exec"), names)
    return names


def test_the_policy(capsys):
    policy, use = code("python")[:2]
    names = run(policy, use)
    assert capsys.readouterr().out
    layers = [type("Layer", (), {"value_norms": staticmethod(lambda count: mx.array([[1.0, 3.0], [2.0, 4.0]]))})()]
    tokens = type("Tokens", (), {"positions": np.arange(2), "layers": layers})()
    assert names["ValueNorm"]().score(tokens).tolist() == [1.5, 3.5]


def test_the_format(capsys):
    names = run("import mlx_tq, mlx_tq.codec", *code("python")[2:4])
    assert capsys.readouterr().out.startswith("66 bytes, error 0.0")
    codec = names["codec"]
    assert not mx.any(codec.decode(codec.encode(mx.zeros((3, 128)))))


def test_the_kernel(tmp_path, monkeypatch):
    (text,) = code("metal")
    folder = tmp_path / "metal"
    shutil.copytree(ROOT / "metal", folder)
    (folder / "scale_rows.metal").write_text(text)
    monkeypatch.setattr(gpu, "kernels_folder", lambda: folder)
    names = run(*code("python")[4:6])
    broken = text.replace("* row_factors[row]", "+ row_factors[row]")
    (folder / "scale_rows.metal").write_text(broken)
    gpu.kernel_text.cache_clear()
    gpu.compile_kernel.cache_clear()
    with pytest.raises(AssertionError):
        exec(code("python")[5], names)
    gpu.kernel_text.cache_clear()
    gpu.compile_kernel.cache_clear()
