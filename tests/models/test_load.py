"""A loaded model is complete: its weights are computed, in whatever type."""

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest

import mlx_tq
from mlx_tq.models import dense, free_ram

from .gguf_files import write_gguf


@pytest.mark.parametrize("dequantize", [None, False, True])
@pytest.mark.parametrize("dtype", [None, *(pytest.param(x, marks=pytest.mark.full) for x in ("float32", "float16"))])
@pytest.mark.parametrize("kind", ["needle", "F16", "Q8_0"])
def test_it_runs_in_another_thread(tmp_path, kind, dtype, dequantize):
    path = None if kind == "needle" else write_gguf(tmp_path / "model.gguf", "llama", kind)
    model, _ = mlx_tq.load(path, dtype=dtype, dequantize=dequantize)
    with ThreadPoolExecutor(1) as pool:
        logits = pool.submit(lambda: model(mx.array([[1, 2, 3]])).tolist()).result()
    assert logits == model(mx.array([[1, 2, 3]])).tolist()


def test_a_container_has_what_its_programs_left(tmp_path, monkeypatch):
    limit, statistics = tmp_path / "max", tmp_path / "stat"
    limit.write_text("1000000\n")
    statistics.write_text("anon 400000\nfile 500000\n")
    monkeypatch.setattr(dense, "_CGROUPS", ((str(limit), str(statistics), "anon"),))
    assert free_ram() == 600_000
    limit.write_text("max\n")
    assert free_ram() > 1_000_000
