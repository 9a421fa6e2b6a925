"""The studies of benchmarks/studies without the sweep: drift, spectrum, layers."""

import numpy as np
import pytest
from zoo import build

from benchmarks.studies.drift import measure_drift
from benchmarks.studies.layers import Side, measure_layers
from benchmarks.studies.spectrum import key_schedules, measure_spectrum
from mlx_tq.cli.haystack import load_text
from mlx_tq.errors import ConfigError
from mlx_tq.evaluate.arms import OFF, parse_arm
from mlx_tq.evaluate.recording import record_attention
from mlx_tq.evaluate.teacher_forced import cut_chunks

REGIONS = {"sinks": 8, "window": 16, "recent": 32}
LENGTH, STEP = 320, 160  # the first step reads nothing packed


@pytest.fixture(scope="module")
def ids(embedded):
    (chunk,) = cut_chunks(embedded[1], load_text(), 1, 384)
    return chunk


def test_codes_of_the_first_layer_do_not_depend_on_the_step_and_those_of_later_layers_do(exact, ids):
    rows = measure_drift(exact[0], ids, parse_arm("tq3/tq3", sinks=16, window=32), [32, 192, 384])
    assert [(row["step"], row["first_layer"]) for row in rows] == [(32, 0), (192, 0), (384, 0)]
    small, large, whole = rows
    assert whole.items() >= {"later_layers": 0, "kld": 0, "logits": 0, "top1": 100}.items()
    assert small["later_layers"] > 50
    assert small["kld"] > large["kld"] / 4 > 0
    assert small["top1"] < 100


def test_the_fp16_cache_drifts_by_rounding_only(exact, ids):
    (row,) = measure_drift(exact[0], ids[:96], OFF, [32])
    assert (row["first_layer"], row["later_layers"]) == (None, None)
    assert row["kld"] == pytest.approx(0, abs=1e-3)
    with pytest.raises(ConfigError, match="Drop --kv-evict"):
        measure_drift(exact[0], ids, parse_arm("off@50%"), [32])


def test_spectral_shares_are_those_of_the_models_keys(tiny, ids):
    rows = measure_spectrum(tiny, ids[:100])
    assert [row["layer"] for row in rows] == [0, 1]
    for row, layer in zip(rows, record_attention(tiny, ids[:100], 1), strict=True):
        keys = np.array(layer.keys, np.float64)
        energy = np.sort(keys[..., :16] ** 2 + keys[..., 16:] ** 2, axis=-1)[..., ::-1]
        for count, share in row["shares"].items():
            assert share == pytest.approx((energy[..., :count].sum(-1) / energy.sum(-1)).mean(), rel=1e-4)
        assert row["shares"][16] == pytest.approx(1)


def test_a_key_schedule_takes_the_fewest_pairs_that_hold_the_share():
    rows = [
        {"layer": 0, "shares": {8: 0.9, 10: 0.92, 12: 0.94, 14: 0.96, 16: 0.97}},
        {"layer": 1, "shares": {8: 0.3, 10: 0.4, 12: 0.5, 14: 0.6, 16: 0.7}},
    ]
    expected = {"lean": "spectral8+spectral12", "even": "spectral8+spectral16", "rich": "spectral8+tq4"}
    assert key_schedules(rows) == expected


def compare(model, name, reference, ids):
    arms = [OFF if arm == "off" else parse_arm(arm, **REGIONS) for arm in (name, reference)]
    return measure_layers(*(Side(model, arm) for arm in arms), ids[:LENGTH], STEP)


def test_layers_of_a_cache_equal_those_of_the_same_cache(tiny, ids):
    before = list(map(type, tiny.layers))
    with pytest.raises(ConfigError, match="never read a packed one"):
        measure_layers(*[Side(tiny, parse_arm("tq4/tq4", sinks=400))] * 2, ids[:LENGTH], STEP)
    rows, predictions = compare(tiny, "tq4/tq3", "tq4/tq3", ids)
    assert list(map(type, tiny.layers)) == before, "the model's own again"
    assert [row.layer for row in rows] == [0, 1]
    assert [(row.keys, row.values, row.first) for row in rows] == [(100, 100, None)] * 2
    assert [(row.cosine, row.least) for row in rows] == [(pytest.approx(1, abs=1e-12),) * 2] * 2
    assert (predictions.first, predictions.top1, predictions.kld, predictions.tokens) == (None, 100, 0, LENGTH)


def test_the_first_layer_stores_the_codes_of_fp16_and_later_ones_differ(tiny, ids):
    rows, predictions = compare(tiny, "tq2/tq2", "off", ids)
    first, second = rows
    assert (first.keys, first.values, first.first) == (100, 100, None)
    assert 0 < second.keys < 100
    assert 0 < second.values < 100
    assert second.first >= STEP
    assert 1 > first.cosine > second.cosine > second.least > 0.9
    assert predictions.kld > 0
    assert predictions.first is None or predictions.first >= STEP
    other, _ = compare(tiny, "tq4/tq4", "q8/tq4", ids)  # codes of another format are not compared
    assert [row.keys for row in other] == [None, None]
    assert other[0].values == 100 > other[1].values


def test_layers_of_a_hybrid_whose_list_of_layers_is_a_copy():
    """`model.layers` is a slice; a linear layer has hidden states and no codes."""
    model = build("qwen3_next")
    rows, _ = compare(model, "tq4~tq2/tq4", "off", [(7 * i * i + 3 * i) % 160 for i in range(LENGTH)])
    assert [row.keys is None for row in rows] == [type(cache).__name__ != "KVCache" for cache in model.make_cache()]
    assert rows[0].least == pytest.approx(1)  # linear: it has no compressed cache
    assert rows[-1].cosine < 1 - 1e-6
