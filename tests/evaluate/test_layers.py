import json

import pytest
from zoo import build

from mlx_tq.__main__ import main
from mlx_tq.cli.needles.haystack import load_text
from mlx_tq.errors import ConfigError
from mlx_tq.evaluate.arms import OFF, parse_arm
from mlx_tq.evaluate.layers import Side, measure_layers

REGIONS = {"sinks": 8, "window": 16, "recent": 32}
LENGTH, STEP = 320, 160  # the first step meets nothing packed


@pytest.fixture(scope="module")
def ids(embedded):
    return embedded[1].encode(load_text()[:2000], add_special_tokens=False)[:LENGTH]


def compare(model, name, reference, ids, step=STEP):
    sides = [Side(model, OFF if each == "off" else parse_arm(each, **REGIONS)) for each in (name, reference)]
    return measure_layers(*sides, ids, step)


def test_a_cache_against_itself(tiny, ids):
    before = list(map(type, tiny.layers))
    with pytest.raises(ConfigError, match="never read a packed one"):
        measure_layers(*[Side(tiny, parse_arm("tq4/tq4", sinks=400))] * 2, ids, STEP)
    rows, predictions = compare(tiny, "tq4/tq3", "tq4/tq3", ids)
    assert list(map(type, tiny.layers)) == before, "they are the model's own again"
    assert [row.layer for row in rows] == [0, 1]
    assert [(row.keys, row.values, row.first) for row in rows] == [(100, 100, None)] * 2
    assert [(row.cosine, row.least) for row in rows] == [(pytest.approx(1, abs=1e-12),) * 2] * 2
    assert (predictions.first, predictions.top1, predictions.kld, predictions.tokens) == (None, 100, 0, LENGTH)


def test_the_first_layer_stores_what_fp16_would_and_later_ones_drift(tiny, ids):
    rows, predictions = compare(tiny, "tq2/tq2", "off", ids)
    first, second = rows
    assert (first.keys, first.values, first.first) == (100, 100, None)
    assert 0 < second.keys < 100
    assert 0 < second.values < 100
    assert second.first >= STEP
    assert 1 > first.cosine > second.cosine > second.least > 0.9
    assert predictions.kld > 0
    other, _ = compare(tiny, "tq4/tq4", "q8/tq4", ids)  # codes of another format are not compared
    assert [row.keys for row in other] == [None, None]
    assert other[0].values == 100 > other[1].values
    assert predictions.first is None or predictions.first >= STEP


def test_a_hybrid_whose_layers_are_a_copy():
    """`model.layers` is a slice of them; a linear layer has hidden states and no codes."""
    model = build("qwen3_next")
    rows, _ = compare(model, "tq4~tq2/tq4", "off", [(7 * i * i + 3 * i) % 160 for i in range(LENGTH)])
    assert [row.keys is None for row in rows] == [type(cache).__name__ != "KVCache" for cache in model.make_cache()]
    assert rows[0].least == pytest.approx(1)  # linear: it has no cache of ours
    assert rows[-1].cosine < 1 - 1e-6


def test_the_command_compares_with_float32_and_writes_rows(tmp_path, capsys):
    words = ["--profiles", "tq4/tq4", "--length", "200", "--step", "150", "--kv-sinks", "8", "--kv-window", "8"]
    target = tmp_path / "layers.json"
    assert main(["evaluate", "layers", *words, "--against", "float32", "--json", str(target)]) == 0
    found = json.loads(target.read_text())
    assert list(found["results"]) == [*(f"tq4/tq4 {layer}" for layer in range(6)), "tq4/tq4"]
    # The same model, rounded: codes near a boundary differ from the first layer on, and few others.
    assert 95 < found["results"]["tq4/tq4 0"]["keys"] < 100
    assert found["results"]["tq4/tq4 0"]["first"] >= 8
    assert found["results"]["tq4/tq4"]["tokens"] == 200
    assert "Layers against float32" in capsys.readouterr().out
