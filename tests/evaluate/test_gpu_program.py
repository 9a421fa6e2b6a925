"""benchmarks.gpu without a GPU: a dry run that is killed again and again, its tables and plot, and how it installs."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import mlx.core as mx
import pytest
from http_harness import wait_for

from benchmarks.gpu.__main__ import PARTS, main
from benchmarks.gpu.attention import SHAPES, layer_cells
from benchmarks.gpu.limits import probe
from benchmarks.gpu.models import (
    PROFILE_ARMS,
    QUANTIZED,
    ModelArm,
    fill_caches,
    is_growing,
    make_caches,
    make_model,
)
from benchmarks.gpu.models import SHAPES as MODELS
from benchmarks.gpu.results import Results
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.table import print_tables
from benchmarks.gpu.workers import FOLDER
from mlx_tq.kernels import backend
from mlx_tq.prompt_cache.compressed import compressed_attention

ROOT = Path(__file__).parents[2]
KILLED_AT = (1, 14)  # cells that the results have: while processes compare kernels, and while attention is timed


def test_flags(capsys, tmp_path):
    for words, message in ((["models"], "unknown parts: models; valid are comparisons"), (["--dry"], "needs --json")):
        with pytest.raises(SystemExit):
            main(words)
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit, match="needs a GPU"):
        main(["--json", str(tmp_path / "none.json")])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the results of a dry run that was killed at several moments, and the cells that it had at each."""
    folder = tmp_path_factory.mktemp("gpu")
    path, compiled = folder / "dry.json", folder / "compiled"
    (half := folder / "compiled-comparisons-0").mkdir()  # of a process for CUDA: one kernel, and a half of the next
    for name in ("whole.ptx", "whole.txt", "whole.cu", "half.ptx"):
        (half / name).write_text("text")
    variables = {FOLDER: str(compiled), "PYTHONPATH": str(ROOT)}
    seen = []
    for count in KILLED_AT:
        command = [sys.executable, "-m", "benchmarks.gpu", "--dry", "--json", str(path)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, env={**os.environ, **variables})
        try:
            wait_for(lambda count=count: path.exists() and len(json.loads(path.read_text())["cells"]) >= count, 300)
        finally:
            process.kill()
            process.wait()
        seen.append(json.loads(path.read_text())["cells"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(compiled))
        patch.setenv("MLX_ENABLE_TF32", "0")
        main(["--dry", "--json", str(path)])
    return path, seen


@pytest.mark.full
def test_a_killed_run_resumes_and_runs_to_its_end(finished):
    path, seen = finished
    content = json.loads(path.read_text())
    for cells in seen:
        assert cells.items() <= content["cells"].items()  # nothing is measured twice
    assert content["attempts"] == {}
    assert [key for key, cell in content["cells"].items() if {"error", "not_measured"} & cell.keys()] == []
    assert {key.partition("/")[0] for key in content["cells"]} == set(PARTS)
    assert list(content["states"]) == ["before", *(f"after {part}" for part in PARTS)]
    assert {path.name for path in (path.parent / "compiled").iterdir()} == {"whole.ptx", "whole.txt", "whole.cu"}


@pytest.mark.full
def test_what_a_run_has_measured(finished):
    cells = json.loads(finished[0].read_text())["cells"]
    checks = [cell for cell in cells.values() if "passed" in cell]
    assert checks
    assert all(check["passed"] for check in checks)
    attention = [cell for cell in cells.values() if "timings" in cell]
    for timing in (timing for cell in attention for timing in cell["timings"]):
        assert 0 < timing["low"] <= timing["median"] <= timing["high"]
    arms = [timing["arm"] for timing in attention[0]["timings"]]
    arms += attention[0]["skipped_arms"]
    assert sorted(arms) == sorted(
        ["fp16", "fp16, queued writes", "bf16", "kv-bits 8", "kv-bits 4", "q8/tq4", "tq4/tq4", "tq2/tq2", "tcq3/tcq3"]
    )
    for part in ("decode", "prefill"):
        whole = [cell for key, cell in cells.items() if key.startswith(f"{part}/")]
        assert [cell["layers"] for cell in whole] == [4, 2]
        assert {"fp16", "safe", "balanced", "small", "tiny"} <= whole[0]["arms"].keys()
    assert cells["eviction/round of triattention"]["evicted"] > 0


@pytest.mark.parametrize("name", MODELS)
def test_caches_are_filled_in_every_layer_that_attends(name):
    shaped = make_model(name, Setting(dry=True), 160)
    with backend.using("reference"), compressed_attention(shaped.model):
        for arm in (ModelArm("fp16"), *QUANTIZED, *PROFILE_ARMS):
            caches = make_caches(shaped, arm)
            fill_caches(shaped, caches, 160)
            growing = [cache for cache in caches if is_growing(cache)]
            assert [cache.offset for cache in growing] == [160] * shaped.attending_layers, arm
            assert len({cache.nbytes for cache in growing}) == 1, arm
            assert mx.isfinite(shaped.model(mx.array([[1]]), cache=caches)).all(), arm


@pytest.mark.full
def test_tables_come_from_the_results(finished, capsys):
    content = json.loads(finished[0].read_text())
    content["cells"]["attention/Gemma 3"] = {"not_measured": "later"}
    content["cells"]["comparisons/wrong"] = {"difference": 1, "allowed": 0, "passed": False}
    print_tables(content)
    shown = capsys.readouterr().out
    assert "launch floor" in shown
    assert "FAILED comparisons/wrong: differs from the reference implementation" in shown
    assert "1 cells were not measured: the time was over" in shown
    for title in ("Attention of one layer", "Decode steps", "Prefill", "Eviction and recall", "Kernels"):
        assert f"\n{title}" in shown


@pytest.mark.full
def test_a_plot_comes_from_the_results(finished, tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.gpu.plot import plot

    path = tmp_path / "dry.json"
    path.write_text(finished[0].read_text())
    assert plot(path).read_text().count('<g id="axes_') == 2


def test_results_of_other_kernels_are_not_continued(tmp_path):
    path = tmp_path / "results.json"
    results = Results(path, dry=True)
    results.content["environment"]["kernels"] = "other"
    results.put("part/cell", {})
    with pytest.raises(SystemExit, match=r"results with kernels 'other'.*Name another file"):
        Results(path, dry=True)


def test_a_cell_that_ends_the_program_is_tried_three_times(tmp_path):
    def end_program():
        raise SystemExit

    path = tmp_path / "results.json"
    for _ in range(3):
        with pytest.raises(SystemExit):
            Results(path, dry=True).measure("part/cell", end_program)
    results = Results(path, dry=True)
    results.measure("part/cell", end_program)
    assert results.cells == {"part/cell": {"error": "the program ended 3 times while it measured this"}}


@pytest.mark.full
def test_cells_beyond_the_time_are_recorded_and_measured_later(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    path = tmp_path / "results.json"
    words = ["attention", "--dry", "--json", str(path)]
    with backend.using("reference"):
        results = Results(path, dry=True)
    results.put("other/cell", {"took": 100})
    results.put("attention/machine before", {"not_measured": "the time was over"})
    main([*words, "--seconds", "50"])
    cells = json.loads(path.read_text())["cells"]
    assert {cell["not_measured"] for key, cell in cells.items() if key != "other/cell"} == {"28 of 50 s were over"}
    main([*words, "--seconds", "200"])
    cells = json.loads(path.read_text())["cells"]
    assert "copy_gb_per_s" in cells["attention/machine before"]


def test_the_cells_of_a_gpu():
    cells = [cell for _, cell, _ in layer_cells(Setting())]
    assert len(cells) == len(set(cells)) == len(SHAPES) * (5 + 2 * 2 + 2)
    assert [cell.tokens for cell in cells[:: len(SHAPES)]][:5] == [1024, 4096, 16384, 65536, 131072]
    assert {cell.tokens for cell in cells if cell.batch == 8 or cell.length > 1} == {4096, 65536}


def test_a_limit_of_threads_is_what_mlx_names():
    limits, calls = {}, []

    def kernel(threadgroup, **call):
        calls.append(threadgroup)
        if threadgroup[0] > 448:
            raise ValueError(
                "Thread group size (4096) is greater than  the maximum allowed threads per threadgroup (448)."
            )
        return []

    for _ in range(2):
        probe(kernel, "attend", limits)(threadgroup=(128, 1, 1), grid=(256, 1, 1))
    assert limits == {"attend": 448}
    assert [threads for threads, *_ in calls] == [4096, 128, 128]


@pytest.mark.full
def test_installs_from_wheels_in_parts_without_a_network(tmp_path):
    """The script takes a folder of wheels, large ones in parts, and runs the program with the given flags."""
    wheels, target = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    wheel = tmp_path / "gpu_wheel_of_a_test-1.0-py3-none-any.whl"
    about = "gpu_wheel_of_a_test-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("gpu_wheel_of_a_test.py", "VALUE = 1\n")
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: gpu-wheel-of-a-test\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    whole = wheel.read_bytes()
    parts = [whole[start : start + 200] for start in range(0, len(whole), 200)]
    for number, part in enumerate(parts[:-1]):
        (wheels / f"{wheel.name}.part{number:02}").write_bytes(part)
    (last := tmp_path / "last").mkdir()
    (last / f"{wheel.name}.part{len(parts) - 1:02}").write_bytes(parts[-1])
    script = ["bash", ROOT / "benchmarks" / "gpu" / "install.sh"]
    variables = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    options = {"cwd": tmp_path, "env": variables, "capture_output": True, "text": True, "timeout": 120, "check": False}
    done = subprocess.run([*script, wheels, target, "--help"], **options)
    assert (done.returncode, "lacks parts; run this again" in done.stderr) == (1, True), done.stderr
    done = subprocess.run([*script, last, target, "--help"], **options)
    assert done.returncode == 0, done.stderr
    assert "python -m benchmarks.gpu" in done.stdout
    assert (target / "gpu_wheel_of_a_test.py").read_text() == "VALUE = 1\n"
