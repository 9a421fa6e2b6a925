import pytest

from mlx_tq.cli.needles.haystack import load_text
from mlx_tq.errors import ConfigError
from mlx_tq.evaluate import command
from mlx_tq.evaluate.arms import parse_arm
from mlx_tq.evaluate.flags import build_parser
from mlx_tq.evaluate.needle import Cell, measure_needles

REGIONS = {"sinks": 32, "window": 64}


def found(cells):
    return [(cell.name, cell.depth, cell.verdict) for cell in cells]


def test_the_embedded_model_finds_a_packed_needle(exact):
    cells = measure_needles(
        *exact,
        load_text(),
        [parse_arm("balanced", **REGIONS)],
        lengths=[500],
        depths=[0.5],
        seeds=[0],
        max_tokens=32,
    )
    assert found(cells) == [("off", 0.5, "PASS"), ("balanced", 0.5, "PASS")]
    for cell in cells:
        start, stop = cell.needle
        assert cell.live == stop - start
        assert cell.packed == (0 if cell.name == "off" else stop - start)
        assert cell.expected in cell.answer
        assert "What is" not in cell.answer


@pytest.mark.full
def test_the_embedded_model_finds_needles_everywhere(exact):
    arms = [parse_arm(name, **REGIONS) for name in ("balanced", "small")]
    cells = measure_needles(*exact, load_text(), arms, lengths=[500, 1000, 2000], seeds=range(2), max_tokens=32)
    assert len(cells) == 3 * 3 * 2 * 3
    assert sum(cell.verdict == "VOID" for cell in cells) <= 4
    missed = [cell for cell in cells if cell.verdict not in ("PASS", "VOID") and cell.name != "off"]
    assert [cell for cell in missed if cell.name == "balanced"] == []
    assert len(missed) <= 1  # at 2,000 tokens the model itself gives one digit a probability of 0.64


def test_a_cell_is_void_where_the_baseline_fails(tiny, embedded):
    asked = []
    options = {"lengths": [300], "depths": [0, 1], "seeds": [0], "max_tokens": 2, "report": asked.append}
    cells = measure_needles(tiny, embedded[1], load_text(), [parse_arm("balanced", **REGIONS)], **options)
    assert found(cells) == [("off", 0, "FAIL"), ("balanced", 0, "VOID"), ("off", 1, "FAIL"), ("balanced", 1, "VOID")]
    assert asked == cells


def test_arms_must_share_their_regions(tiny, embedded):
    arms = [parse_arm("balanced"), parse_arm("small", window=64)]
    with pytest.raises(ConfigError, match="different prefixes and windows"):
        measure_needles(tiny, embedded[1], load_text(), arms, lengths=[500])
    with pytest.raises(ConfigError, match="exceed the model's 4,096 positions"):
        measure_needles(tiny, embedded[1], load_text(), arms[:1], lengths=[4090])


@pytest.mark.parametrize(
    ("verdicts", "strict", "code"),
    [
        (("PASS", "PASS"), True, 0),
        (("PASS", "PARTIAL_WORD"), True, 1),
        (("PASS", "TITLE_CASE"), True, 1),
        (("PASS", "FAIL"), False, 0),
        (("FAIL", "VOID"), True, 0),
    ],
)
def test_strict_fails_where_a_compressed_cache_misses(monkeypatch, capsys, verdicts, strict, code):
    about = {"length": 1000, "depth": 0.0, "seed": 0, "needle": (40, 70), "live": 30, "packed": 30}
    names = zip(("off", "small"), verdicts, strict=True)
    cells = [Cell(name, *about.values(), verdict, "RED FOX 1", "") for name, verdict in names]
    monkeypatch.setattr(command.needle, "measure_needles", lambda *args, **options: cells)
    words = ["needle", "--profiles", "small", *(["--strict"] if strict else [])]
    assert command.run(build_parser().parse_args(words)) == code
    assert "Needles found" in capsys.readouterr().out
