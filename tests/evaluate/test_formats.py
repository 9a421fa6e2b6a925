import pytest

from mlx_tq.cli.inputs import load_text
from mlx_tq.config import KVConfig
from mlx_tq.errors import ConfigError
from mlx_tq.evaluate.arms import parse_pairs
from mlx_tq.evaluate.formats import measure_formats
from mlx_tq.evaluate.teacher_forced import cut_chunks

NAMES = "fp16,q8,tq4,tq3,tq2"
REGIONS = {"sinks": 16, "window": 32}
# Bytes of a vector of 32 at each format's bits, with its scale; the tiny model is fp32.
BODY = 208  # tokens packed of the 256 before the last 64
SIZES = {"fp16": 128, "q8": 34, "tq4": 18, "tq3": 14, "tq2": 10}


@pytest.fixture(scope="module")
def rows(tiny, embedded):
    chunks = cut_chunks(embedded[1], load_text(), 1, 320)
    pairs = "q8/q8,q8/tq4,tq4/tq4,tq3/tq2,tq2/tq2"
    choices = (("fp16", NAMES), (None, None, pairs), ("q8,tq4,tq3,tq2", "fp16"))
    arms = [arm for choice in choices for arm in parse_pairs(*choice, **REGIONS)]
    return {row["name"]: row for row in measure_formats(tiny, chunks, arms, 160)}


def test_all_pairs_of_two_lists_are_measured():
    names = [arm.name for arm in parse_pairs(NAMES, NAMES, **REGIONS)]
    assert len(set(names)) == 25
    assert {"fp16/fp16", "q8/tq4", "tq2/tq2"} <= set(names)


@pytest.mark.parametrize("name", ["fp16/fp16", "q8/q8", "q8/tq4", "tq4/tq4", "tq3/tq2", "fp16/tq3"])
def test_bytes_come_from_arrays_and_equal_the_formats(rows, name):
    payload = sum(SIZES[part] for part in name.split("/"))
    row = rows[name]
    normalized = 0 if name.startswith("fp16") else 32 * (4 + 2 * 2) / BODY  # a weight a dim and two fp16 means
    vector = -(-payload // 4) * 4 + normalized  # padded to 4 bytes
    assert row["nbytes"] == pytest.approx(2 * 2 * vector)  # layers, heads
    assert row["ratio"] == pytest.approx(2 * 2 * 256 / row["nbytes"])


def test_errors_grow_as_bits_fall_and_touch_only_their_side(rows):
    for pair, side, other in (("fp16/{}", "value_error", "key_error"), ("{}/fp16", "key_error", "value_error")):
        measured = [rows[pair.format(name)] for name in ("q8", "tq4", "tq3", "tq2")]
        errors = [row[side] for row in measured]
        assert errors == sorted(errors)
        assert [row[other] for row in measured] == [0] * 4
        assert errors[1:] == pytest.approx([0.0095, 0.034, 0.117], rel=0.15)  # the codecs' own
        assert [row["cosine"] for row in measured] == sorted((row["cosine"] for row in measured), reverse=True)
    control = rows["fp16/fp16"]
    assert (control["cosine"], control["packed"]) == (1, 0)
    assert (control["kld"], control["delta"]) == pytest.approx((0, 0), abs=1e-4)
    assert rows["tq2/tq2"]["kld"] > rows["q8/q8"]["kld"] > 0
    assert rows["tq2/tq2"]["packed"] > 0.3


def test_a_format_may_have_a_scale_rule_and_must_be_known():
    rules = {arm.name: arm.config.key_scale for arm in parse_pairs("tq4:raw,q8", "tq2")}
    assert rules == {"tq4:raw/tq2": "raw", "q8/tq2": KVConfig.key_scale}
    with pytest.raises(ConfigError, match="format 'tq5' is unknown"):
        parse_pairs("tq5", None)
