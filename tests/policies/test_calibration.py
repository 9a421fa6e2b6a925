"""Calibration: which queries count, in which windows, and which calibration files are accepted."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_tq.errors import CacheFormatError
from mlx_tq.policies import Published, TriAttention
from mlx_tq.policies.calibration import QueryStats, load_calibration, save_calibration
from mlx_tq.policies.rope import learn_rope

DIM, HEADS = 32, 3
ROPE = learn_rope(nn.RoPE(DIM), DIM)
QUERIES = np.random.default_rng(0).standard_normal((1, HEADS, 400, DIM)).astype(np.float32)


def feed(calibrator, chunks, start=0):
    for chunk in chunks:
        mx.eval(calibrator.observe(mx.array(QUERIES[:, :, start : start + chunk]), start, ROPE.module))
        start += chunk
    return calibrator


def check(stats, first, last):
    """Compare statistics with the plain means of queries [first, last)."""
    part = QUERIES[0, :, first:last].astype(np.float64)
    lengths = np.abs(part[..., : DIM // 2] + 1j * part[..., DIM // 2 :])
    assert np.allclose(stats.center, part.mean(axis=1), atol=1e-5)
    assert np.allclose(stats.amplitude, lengths.mean(axis=1), atol=1e-5)


def triattention():
    return TriAttention(warmup=100).make_calibrator(ROPE)


@pytest.mark.parametrize("chunks", [[400], [1] * 120, [3, 90, 7, 60], [104], [5] * 30])
def test_the_first_tokens_behind_the_sinks_count(chunks):
    """Positions 4 to 104 count, in whatever chunks they arrive."""
    calibrator = feed(triattention(), chunks)
    check(calibrator.stats, 4, 104)
    assert (calibrator.ready, calibrator.is_gathering) == (True, False)
    assert calibrator.current_stats is calibrator.stats


def test_a_window_that_is_not_full_can_score_and_queries_count_once():
    """The same positions come again after a trim, or from another layer that shares the cache."""
    early = feed(triattention(), [103])
    assert (early.ready, early.can_score, early.due(103), early.due(104)) == (False, True, False, True)
    check(early.current_stats, 4, 103)
    assert not feed(triattention(), [4]).can_score
    twice = feed(feed(triattention(), [60]), [60])
    check(feed(twice, [80], 40).stats, 4, 104)


def test_ema_blends_later_windows_in():
    calibrator = feed(Published(warmup=50, ema=0.25).make_calibrator(ROPE), [120, 40])
    means = [QUERIES[0, :, s : s + 50].mean(axis=1) for s in (4, 54, 104)]
    wanted = 0.75 * (0.75 * means[0] + 0.25 * means[1]) + 0.25 * means[2]
    assert np.allclose(calibrator.stats.center, wanted, atol=1e-5)
    assert calibrator.is_gathering


def test_recalibration_replaces():
    calibrator = feed(Published(warmup=50, recalibrate=150).make_calibrator(ROPE), [100, 53])
    check(calibrator.stats, 4, 54)
    check(feed(calibrator, [60], 153).stats, 154, 204)


@pytest.mark.parametrize("policy", [TriAttention(warmup=100), Published(warmup=100, recalibrate=400)])
def test_a_copy_and_a_state_continue(policy):
    calibrator = feed(policy.make_calibrator(ROPE), [60])
    twin, restored = calibrator.copy(), policy.make_calibrator()
    restored.restore(calibrator.state)
    assert restored.is_gathering
    for each in (calibrator, twin, restored):
        check(feed(each, [50], 60).stats, 4, 104)
    assert restored.rope.pairs.tolist() == ROPE.pairs.tolist()


def stats():
    return QueryStats(mx.array(QUERIES[0, :, 0]), mx.ones((HEADS, DIM // 2)))


def test_a_calibration_file_has_what_was_saved(tmp_path):
    path = tmp_path / "stats.safetensors"
    save_calibration(path, "model", [ROPE, ROPE], [stats(), stats()])
    found = load_calibration(path, "model").check([ROPE, ROPE])
    for layer in found:
        assert np.array_equal(layer.center, stats().center)
        calibrator = TriAttention().make_calibrator(ROPE, layer)
        assert calibrator.ready
        assert not calibrator.is_gathering
        assert calibrator.copy().ready


def test_foreign_calibration_files_are_refused(tmp_path):
    path, empty, text, weights = (tmp_path / name for name in ("stats.safetensors", "empty", "text", "w.safetensors"))
    save_calibration(path, "model", [ROPE], [stats()])
    empty.touch()
    text.write_text("x" * 40)
    mx.save_safetensors(str(weights), {"x": mx.zeros(1)})
    modules = (nn.RoPE(DIM, base=5000), nn.RoPE(DIM, traditional=True), nn.RoPE(DIM // 2), nn.RoPE(DIM, scale=0.5))
    other_ropes = [*(learn_rope(module, DIM) for module in modules), learn_rope(nn.RoPE(64), 64)]
    refusals = [
        (path, "other", {}, r"made with another model.*mlx_tq\.calibrate"),
        (path, "model", {"ropes": [ROPE, ROPE]}, "has 1 layers, the model 2"),
        *((path, "model", {"ropes": [rope]}, "another RoPE than layer 0") for rope in other_ropes),
        (path, "model", {"ropes": [ROPE], "covariance": True}, r"has no covariance.*mlx_tq\.calibrate --covariance"),
        *((file, "model", {}, "damaged or not a calibration file") for file in (empty, text)),
        (weights, "model", {}, "is not a calibration file of version"),
        (tmp_path / "none", "model", {}, "there is no calibration file"),
    ]
    for file, model, options, message in refusals:
        with pytest.raises(CacheFormatError, match=message):
            load_calibration(file, model).check(**options)


SHAPES = {
    "0.center": (2, 3, 4), "0.amplitude": (7,), "0.moment": (1, 1), "0.rope": (), "layers": "x", "1.center": None,
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_forged_calibration_files_are_refused(tmp_path, name):
    path, shape = tmp_path / "stats.safetensors", SHAPES[name]
    save_calibration(path, "model", [ROPE], [stats()])
    arrays, header = mx.load(str(path), return_metadata=True)
    if name == "layers":
        header[name] = shape
    elif shape is None:
        header["layers"] = "1000000000000"
    else:
        arrays[name] = mx.zeros(shape)
    mx.save_safetensors(str(path), arrays, header)
    with pytest.raises(CacheFormatError, match=r"(is damaged \(|another RoPE).*Make it again with mlx_tq\.calibrate"):
        load_calibration(path, "model").check([ROPE])


def test_only_calibration_files_are_replaced(tmp_path):
    path, theirs = tmp_path / "stats.safetensors", tmp_path / "weights.safetensors"
    for model in ("one", "two"):
        save_calibration(path, model, [ROPE], [stats()])
    assert load_calibration(path, "two").layers
    mx.save_safetensors(str(theirs), {"x": mx.zeros(1)})
    before = theirs.read_bytes()
    with pytest.raises(CacheFormatError, match="is not a calibration file and is not replaced"):
        save_calibration(theirs, "two", [ROPE], [stats()])
    assert theirs.read_bytes() == before
