"""`mlx_tq.doctor` passes on a sound installation and fails on a broken codec."""

import json

import mlx.core as mx
import pytest

from mlx_tq import __main__
from mlx_tq.codec.formats.scalar import Q8Codec
from mlx_tq.codec.rotation import WalshHadamard
from mlx_tq.config import PROFILES


def test_json_has_versions_and_passing_checks(capsys):
    assert __main__.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["environment"]["backend"] in {"cpu", "metal", "cuda"}
    assert report["environment"]["mlx-lm"]
    names = [check["name"] for check in report["checks"]]
    assert {"fp16", "q8", "tq4", "tq3", "tq2", "attention", "TurboQuant 4 bit"} <= set(names)
    assert all(check["passed"] for check in report["checks"])


@pytest.mark.parametrize(
    ("owner", "method", "broken"),
    [
        (Q8Codec, "decode_planes", lambda self, codes: [codes.view(mx.uint8).astype(mx.float32)]),
        (WalshHadamard, "inverse", lambda self, y: y),
    ],
)
def test_a_broken_codec_fails(monkeypatch, capsys, owner, method, broken):
    monkeypatch.setattr(owner, method, broken)
    assert __main__.main(["doctor"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_what_fits_in_a_memory(capsys):
    assert __main__.main(["doctor", "--capacity", "--memory", "200MB", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = {each["profile"]: each for each in report["profiles"]}
    assert list(found) == list(PROFILES)
    assert found["off"]["streams"]["4096"] < found["balanced"]["streams"]["4096"] < found["tiny"]["streams"]["4096"]
    assert found["balanced"]["longest"]["1"] == report["positions"] == 4096
    assert __main__.main(["doctor", "--capacity", "--memory", "200MB"]) == 0
    assert "200.0 MB of memory, 13.9 MB of it weights" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--memory", "1GB"), "--capacity"),
        (("--capacity", "--memory", "1MB"), "13.9 MB"),
        (("--dtype", "float16"), "drop"),
    ],
)
def test_what_cannot_be_counted(capsys, words, says):
    assert __main__.main(["doctor", *words]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--dequantize"], "say what --capacity counts"),
        (["--memory", "2GB"], "say what --capacity counts"),
        (["--capacity", "--kernels"], "Give one of the two"),
    ],
)
def test_a_flag_that_would_do_nothing_is_refused(capsys, words, says):
    assert __main__.main(["doctor", *words]) == 2
    assert says in capsys.readouterr().err
