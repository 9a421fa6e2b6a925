"""`mlx_tq.doctor` passes on a sound installation and fails on a broken codec."""

import json

import mlx.core as mx
import pytest

from mlx_tq import cli
from mlx_tq.codec.formats.q8 import Q8Codec
from mlx_tq.codec.rotation import WalshHadamard


def test_json_has_versions_and_passing_checks(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["environment"]["backend"] in {"cpu", "metal", "cuda"}
    assert report["environment"]["mlx-lm"]
    names = [check["name"] for check in report["checks"]]
    assert {"fp16", "q8", "tq4", "tq3", "tq2", "attention", "TurboQuant 4 bit"} <= set(names)
    assert all(check["passed"] for check in report["checks"])


@pytest.mark.parametrize(
    ("owner", "method", "broken"),
    [
        (Q8Codec, "planes", lambda self, codes: [codes.view(mx.uint8).astype(mx.float32)]),
        (WalshHadamard, "inverse", lambda self, y: y),
    ],
)
def test_a_broken_codec_fails(monkeypatch, capsys, owner, method, broken):
    monkeypatch.setattr(owner, method, broken)
    assert cli.main(["doctor"]) == 1
    assert "FAILED" in capsys.readouterr().out
