"""`mlx_tq.doctor` passes on a sound installation, fails on a broken codec, and counts what fits into memory."""

import mlx.core as mx
import pytest

from mlx_tq.codec.formats.scalar import Q8Codec
from mlx_tq.codec.rotation import WalshHadamard
from mlx_tq.config import PROFILES


def test_json_has_versions_and_passing_checks(cli):
    report = cli("doctor", "--json").json
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
def test_a_broken_codec_fails(monkeypatch, cli, owner, method, broken):
    monkeypatch.setattr(owner, method, broken)
    result = cli("doctor")
    assert (result.code, "FAILED" in result.out) == (1, True)


def test_capacity(cli):
    words = ("doctor", "--capacity", "--memory", "200MB")
    report = cli(*words, "--json").json
    profiles = {profile["profile"]: profile for profile in report["profiles"]}
    assert list(profiles) == list(PROFILES)
    off, balanced, tiny = (profiles[name]["streams"]["4096"] for name in ("off", "balanced", "tiny"))
    assert off < balanced < tiny
    assert profiles["balanced"]["longest"]["1"] == report["positions"] == 4096
    assert "200.0 MB of memory, 13.9 MB of it weights" in cli(*words).out
