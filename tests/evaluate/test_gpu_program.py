"""benchmarks.gpu without a GPU: its flags, its measurements in the CPU's operations, and the table of its results."""

from itertools import islice

import pytest

from benchmarks import tables
from benchmarks.gpu.__main__ import build_parser, main
from benchmarks.gpu.attention import ARMS, SHAPES, Cell, cells, measure
from benchmarks.gpu.selftest import check_share, join_lines


def test_flags(capsys):
    args = build_parser().parse_args(["selftest", "--seconds", "9"])
    assert (args.parts, args.seconds, args.folder) == (["selftest"], 9, None)
    assert build_parser().parse_args([]).parts == []
    with pytest.raises(SystemExit):
        main(["models"])
    assert "unknown parts: models" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
        main([])


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_attends_as_its_reference(arm):
    row = measure(arm, Cell("Gemma 3", 320, length=3), rounds=1)
    assert row["difference"] < 1e-2
    assert 0 < row["low"] == row["seconds"] == row["high"]


def test_rows_become_the_table(monkeypatch):
    measured = [{"arm": arm, **cell._asdict(), "seconds": 1e-6 * cell.tokens} for cell, arms in cells() for arm in arms]
    about = {"shapes": SHAPES, "rows": measured, "device": "GPU", "backend": "cuda", "mlx": "1", "mlx-lm": "2"}
    monkeypatch.setattr(tables, "report", lambda name: about)
    lines = tables.gpu_attention().splitlines()
    assert lines[1] == "python -m benchmarks.gpu"
    assert len(lines) == 7 + 3 * len(SHAPES) + 1
    assert lines[-1] == "| gpt-oss: 64/8 heads of 64 | 131,072 | 131072 | 131072 | 131072 | 131072 | 1.00 |"


def test_processes_share_the_comparisons():
    shares = [list(islice(check_share(process, 2, "reference"), 1)) for process in (0, 1)]
    assert [(check.kernel, check.difference) for (check,) in shares] == [("encode", 0), ("dequantize", 0)]
    line = '{"kernel": "wht", "case": "q8/q8", "difference": 2.0, "allowed": 1.0}'
    report = join_lines([line, line[:30]])
    assert report["rows"] == report["failed"]
    assert len(report["rows"]) == 1
