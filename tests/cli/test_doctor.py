"""`mlx_tq.doctor` passes on a sound installation, fails on a broken codec, and counts what fits into memory."""

import json
import re
import subprocess
import sys
from ctypes.util import find_library

import mlx.core as mx
import pytest
from hub import serve_hub

from mlx_tq.codec.formats.scalar import Q8Codec
from mlx_tq.codec.rotation import WalshHadamard
from mlx_tq.config import PROFILES

from .tools import command, environment, zoo_model


def test_json_has_versions_and_passing_checks(cli):
    report = cli("doctor", "--json").json
    assert report["environment"]["backend"] in {"cpu", "metal", "cuda"}
    assert report["environment"]["mlx-lm"]
    names = [check["name"] for check in report["checks"]]
    assert {"fp16", "q8", "tq4", "tq3", "tq2", "attention", "TurboQuant 4 bit"} <= set(names)
    assert all(check["passed"] for check in report["checks"])


VERSIONS = r"backend \w+, attention .+, mlx_tq \S+, mlx \S+, mlx-lm \S+, Python \S+"
ONE_LINE = rf"OK: \d\d checks passed, {VERSIONS}\n"


@pytest.mark.full  # as that with a slow BLAS, which runs on Linux
def test_one_line_says_that_all_is_well(cli):
    """On a CPU with a slow BLAS, a warning follows."""
    result = cli("doctor")
    assert re.fullmatch(ONE_LINE, result.out)
    assert result.code == 0
    assert all(line.startswith("warning: float32 ") for line in result.err.splitlines())


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="macOS uses Accelerate")
@pytest.mark.skipif(find_library("openblas") is not None, reason="this system has OpenBLAS, which is used")
def test_a_slow_blas_is_a_warning():
    """The BLAS of mlx's wheel, without that of FAISS; another may be preloaded into this process."""
    variables = environment(MLX_TQ_BACKEND="reference")
    variables.pop("LD_PRELOAD", None)
    program = "import sys; sys.modules['faiss'] = None; from mlx_tq.doctor import main; sys.exit(main([]))"
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True)
    assert re.fullmatch(ONE_LINE, done.stdout)
    (line,) = done.stderr.splitlines()
    assert line.startswith("warning: float32 prompts are slow with the reference BLAS of mlx's wheel. ")


@pytest.mark.full  # `test_a_broken_codec_fails` has --verbose too
def test_verbose_shows_every_check(cli):
    out = cli("doctor", "--verbose").out
    checks = [line for line in out.splitlines() if line.endswith("ok")]
    assert f"OK: {len(checks)} checks passed" in out
    assert "thresholds built in" in out


@pytest.mark.full
@pytest.mark.parametrize(
    ("owner", "method", "broken", "is_verbose"),
    [
        pytest.param(
            *(Q8Codec, "decode_planes", lambda self, codes: [codes.view(mx.uint8).astype(mx.float32)], False),
            marks=pytest.mark.full,
        ),
        (WalshHadamard, "inverse", lambda self, y: y, True),
    ],
    ids=["decode_planes", "inverse, verbose"],
)
def test_a_broken_codec_fails(monkeypatch, cli, owner, method, broken, is_verbose):
    """Only the failed checks are shown, with --verbose the others too."""
    monkeypatch.setattr(owner, method, broken)
    result = cli("doctor", *(["--verbose"] if is_verbose else []))
    *_, summary = lines = result.out.splitlines()
    failed = [line for line in lines if line.endswith("FAILED")]
    assert (result.code, any(line.endswith("ok") for line in lines)) == (1, is_verbose)
    assert ("thresholds built in" in result.out) == is_verbose
    assert re.match(rf"FAILED: {len(failed)} of \d\d checks, backend ", summary)


@pytest.mark.full
def test_capacity(cli):
    words = ("doctor", "--capacity", "--memory", "200MB")
    report = cli(*words, "--json").json
    profiles = {profile["profile"]: profile for profile in report["profiles"]}
    assert list(profiles) == list(PROFILES)
    off, balanced, tiny = (profiles[name]["streams"]["4096"] for name in ("off", "balanced", "tiny"))
    assert off < balanced < tiny
    assert profiles["balanced"]["longest"]["1"] == report["positions"] == 4096
    assert "Memory 200.0 MB, weights 13.9 MB" in cli(*words).out


@pytest.mark.full
@pytest.mark.parametrize("is_sharded", [pytest.param(False, marks=pytest.mark.full), True])
def test_capacity_of_a_model_on_the_hub_downloads_no_weights(cli, tmp_path, is_sharded):
    folder = zoo_model(tmp_path / "model", "llama", hidden_size=512, intermediate_size=1024)
    words = ("doctor", "--capacity", "--memory", "200MB", "--json")
    expected = cli(*words, "--model", folder).json
    if is_sharded:
        shard(folder)
    variables = environment(HF_HOME=str(tmp_path / "home"))
    with serve_hub("someone/small-model", folder) as hub:
        words = command(*words, "--model", "someone/small-model")
        done = subprocess.run(words, env={**variables, "HF_ENDPOINT": hub.url}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected
    weights = [file for file in folder.iterdir() if file.suffix == ".safetensors"]
    assert len(weights) == (2 if is_sharded else 1)
    for file in weights:
        assert 0 < hub.sent[file.name] <= 100_001 < file.stat().st_size


def shard(folder):
    """Split the weights of a model into two files with an index."""
    whole = folder / "model.safetensors"
    weights = dict(mx.load(str(whole)))
    names = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(sorted(weights))}
    for file in set(names.values()):
        part = {name: weight for name, weight in weights.items() if names[name] == file}
        mx.save_safetensors(str(folder / file), part)
    whole.unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


@pytest.mark.full
def test_a_name_that_the_hub_does_not_have(tmp_path):
    variables = environment(HF_HOME=str(tmp_path / "home"))
    with serve_hub("someone/other", tmp_path) as hub:
        words = command("doctor", "--capacity", "--model", "someone/nothing")
        done = subprocess.run(words, env={**variables, "HF_ENDPOINT": hub.url}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no such folder, and it could not be downloaded from the hub" in done.stderr.splitlines()[-1]
