"""`mlx_tq.bench` times every arm and writes what it found; timings themselves are not judged here."""

import json

import pytest

from mlx_tq import cli

SMALL = ["--tokens", "512", "--dtypes", "float32", "--rounds", "1", "--query-heads", "2", "--kv-heads", "1"]


def test_report(tmp_path, capsys):
    path = tmp_path / "report.json"
    assert cli.main(["bench", *SMALL, "--profiles", "small", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert [t["arm"] for t in report["timings"]] == ["fp16", "kv-bits 8", "kv-bits 4", "small"]
    for timing in report["timings"]:
        assert 0 < timing["low"] <= timing["median"] <= timing["high"]
    sizes = {t["arm"]: t["nbytes"] for t in report["timings"]}
    assert sizes["fp16"] == 512 * 128 * 2 * 4  # float32
    assert "decode attention, float32, 512 tokens" in capsys.readouterr().out


def test_json_to_stdout_is_only_json(capsys):
    assert cli.main(["bench", *SMALL, "--profiles", "safe", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["shape"] == {"query_heads": 2, "kv_heads": 1, "head_dim": 128}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--profiles", "tiny"], "profiles ['tiny'] are unknown; valid are off, safe, balanced, small"),
        (["--dtypes", "int8"], "valid are float16, bfloat16, float32"),
        (["--tokens", "0"], "must be 1 or more"),
        (["--query-heads", "3", "--kv-heads", "2"], "a multiple of KV heads"),
    ],
)
def test_bad_options(options, message, capsys):
    assert cli.main(["bench", *SMALL, *options]) == 2
    assert message in capsys.readouterr().err
