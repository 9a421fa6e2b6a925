import pytest

from mlx_tq.cli.needles.haystack import load_text
from mlx_tq.evaluate.arms import OFF, parse_arm
from mlx_tq.evaluate.drift import measure_drift


def test_the_first_layer_does_not_depend_on_the_step_and_later_ones_drift(exact):
    model, tokenizer = exact
    ids = tokenizer.encode(load_text()[:4000], add_special_tokens=False)[:384]
    rows = measure_drift(model, ids, parse_arm("tq3/tq3", sinks=16, window=32), [32, 192, 384])
    assert [row.step for row in rows] == [32, 192, 384]
    assert [row.first_layer for row in rows] == [0, 0, 0]
    small, large, whole = rows
    assert (whole.later_layers, whole.kld, whole.logits, whole.top1) == (0, 0, 0, 100)
    assert small.later_layers > 50
    assert small.kld > large.kld / 4 > 0
    assert small.top1 < 100


def test_the_control_drifts_by_rounding_alone(exact):
    model, tokenizer = exact
    ids = tokenizer.encode(load_text()[:2000], add_special_tokens=False)[:96]
    (row,) = measure_drift(model, ids, OFF, [32])
    assert (row.first_layer, row.later_layers) == (None, None)
    assert row.kld == pytest.approx(0, abs=1e-3)
