"""Calibration: which queries count, in which windows, and what a file of statistics accepts."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_tq.config import EvictConfig
from mlx_tq.errors import CacheFormatError
from mlx_tq.evict.calibration import load_calibration, save_calibration
from mlx_tq.evict.queries import Calibrator, QueryStats
from mlx_tq.evict.rope import learn_rope

DIM, HEADS = 32, 3
ROPE = learn_rope(nn.RoPE(DIM), DIM)
QUERIES = np.random.default_rng(0).standard_normal((1, HEADS, 400, DIM)).astype(np.float32)


def feed(calibrator, chunks, start=0):
    for chunk in chunks:
        mx.eval(calibrator.observe(mx.array(QUERIES[:, :, start : start + chunk]), start, ROPE.module))
        start += chunk
    return calibrator


def check(stats, first, last):
    """The plain means of queries [first, last)."""
    part = QUERIES[0, :, first:last].astype(np.float64)
    lengths = np.abs(part[..., : DIM // 2] + 1j * part[..., DIM // 2 :])
    assert np.allclose(stats.centre, part.mean(axis=1), atol=1e-5)
    assert np.allclose(stats.amplitude, lengths.mean(axis=1), atol=1e-5)


@pytest.mark.parametrize("chunks", [[400], [1] * 120, [3, 90, 7, 60], [104], [5] * 30])
def test_the_first_tokens_after_the_sinks(chunks):
    """However they arrive: positions 4 to 104, then nothing more."""
    calibrator = feed(Calibrator(ROPE, EvictConfig(warmup=100)), chunks)
    check(calibrator.stats, 4, 104)
    assert calibrator.ready
    assert not calibrator.listens


def test_not_ready_before():
    calibrator = feed(Calibrator(ROPE, EvictConfig(warmup=100)), [103])
    assert not calibrator.ready
    assert calibrator.due(104)
    check(feed(calibrator, [1], 103).stats, 4, 104)


def test_positions_seen_twice_count_once():
    """After a trim, or by another layer that shares the cache."""
    calibrator = feed(Calibrator(ROPE, EvictConfig(warmup=100)), [60])
    assert not calibrator.due(60)
    feed(calibrator, [60])
    feed(calibrator, [80], 40)
    check(calibrator.stats, 4, 104)


def test_ema_blends_later_windows_in():
    calibrator = feed(Calibrator(ROPE, EvictConfig(warmup=50, ema=0.25)), [120, 40])
    means = [QUERIES[0, :, s : s + 50].mean(axis=1) for s in (4, 54, 104)]
    wanted = 0.75 * (0.75 * means[0] + 0.25 * means[1]) + 0.25 * means[2]
    assert np.allclose(calibrator.stats.centre, wanted, atol=1e-5)
    assert calibrator.listens


def test_recalibration_replaces():
    config = EvictConfig(warmup=50, recalibrate=150)
    calibrator = feed(Calibrator(ROPE, config), [100, 53])
    check(calibrator.stats, 4, 54)
    check(feed(calibrator, [60], 153).stats, 154, 204)


def test_a_copy_and_a_state_go_on():
    calibrator = feed(Calibrator(ROPE, EvictConfig(warmup=100)), [60])
    twin, restored = calibrator.copy(), Calibrator(None, EvictConfig(warmup=100))
    restored.restore(calibrator.state)
    assert restored.listens
    for each in (calibrator, twin, restored):
        check(feed(each, [50], 60).stats, 4, 104)
    assert restored.rope.pairs.tolist() == ROPE.pairs.tolist()


def stats():
    return QueryStats(mx.array(QUERIES[0, :, 0]), mx.ones((HEADS, DIM // 2)))


def test_statistics_through_a_file(tmp_path):
    path = tmp_path / "stats.safetensors"
    save_calibration(path, "model", [ROPE, ROPE], [stats(), stats()])
    found = load_calibration(path, "model").check([ROPE, ROPE])
    for layer in found:
        assert np.array_equal(layer.centre, stats().centre)
        calibrator = Calibrator(ROPE, EvictConfig(), layer)
        assert calibrator.ready
        assert not calibrator.listens
        assert Calibrator.copy(calibrator).ready


def test_foreign_statistics_are_refused(tmp_path):
    path = tmp_path / "stats.safetensors"
    save_calibration(path, "model", [ROPE], [stats()])
    with pytest.raises(CacheFormatError, match=r"made with another model.*mlx_tq\.calibrate"):
        load_calibration(path, "other")
    loaded = load_calibration(path, "model")
    with pytest.raises(CacheFormatError, match="has 1 layers, the model 2"):
        loaded.check([ROPE, ROPE])
    for module in (nn.RoPE(DIM, base=5000), nn.RoPE(DIM, traditional=True), nn.RoPE(DIM // 2), nn.RoPE(DIM, scale=0.5)):
        with pytest.raises(CacheFormatError, match="another RoPE than layer 0"):
            loaded.check([learn_rope(module, DIM)])
    with pytest.raises(CacheFormatError, match="another RoPE than layer 0"):
        loaded.check([learn_rope(nn.RoPE(64), 64)])
    with pytest.raises(CacheFormatError, match=r"has no covariance.*mlx_tq\.calibrate --covariance"):
        loaded.check([ROPE], covariance=True)
    for text, message in (("", "damaged or holds no"), ("x" * 40, "damaged or holds no")):
        path.write_text(text)
        with pytest.raises(CacheFormatError, match=message):
            load_calibration(path, "model")
    mx.save_safetensors(str(path), {"x": mx.zeros(1)})
    with pytest.raises(CacheFormatError, match="holds no query statistics"):
        load_calibration(path, "model")
    with pytest.raises(CacheFormatError, match="there is no file of statistics"):
        load_calibration(tmp_path / "none", "model")
