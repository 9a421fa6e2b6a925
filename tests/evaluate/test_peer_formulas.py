"""Formulas of published KV caches agree with scalar loops, and our own with the package's caches."""

import math

import mlx.core as mx
import numpy as np
import pytest

from benchmarks.quality import peer_frontier, peers, sorted_pairs
from benchmarks.quality.rounded_cache import SINKS, LayerRows, Reader, attend_in_steps, rounded_until
from mlx_tq.cli.inputs import load_text
from mlx_tq.evaluate.arms import parse_arm
from mlx_tq.evaluate.teacher_forced import cut_chunks, score_text
from mlx_tq.models import load

RANDOM = np.random.default_rng(5)


def normal(*shape, spread=1.0):
    """Numbers whose channels differ in size, as those of keys do."""
    sizes = np.exp(spread * RANDOM.standard_normal(shape[-1]))
    return (RANDOM.standard_normal(shape) * sizes).astype(np.float32)


def integers(numbers, bits):
    """The rounding of one group, number by number."""
    low = float(np.float16(min(numbers)))
    step = float(np.float16((max(numbers) - min(numbers)) / (2**bits - 1)))
    return [low + step * min(max(round((x - low) / step), 0), 2**bits - 1) for x in map(float, numbers)]


def hadamard(dim):
    """Columns are where unit vectors go, with the signs that the formulas use."""
    return np.array(peers.hadamard_rotate(mx.eye(dim)))


def rows(batch=1, heads=2, query_heads=4, length=384, dim=16):
    pairs = np.array([np.arange(dim // 2), np.arange(dim // 2) + dim // 2])
    keys, values = normal(batch, heads, length, dim) + 1, normal(batch, heads, length, dim)
    return LayerRows(0, 0, pairs, mx.array(normal(batch, query_heads, length, dim)), mx.array(keys), mx.array(values))


def test_kivi_rounds_keys_by_channel_and_values_by_token():
    layer, formula = rows(dim=64), peers.kivi(2)
    keys, values = np.array(formula.keys(layer)), np.array(formula.values(layer))
    for token, channel in ((0, 3), (40, 60), (255, 0)):
        block = SINKS + token // 32 * 32
        group = np.array(layer.keys)[0, 1, block : block + 32, channel]
        assert keys[0, 1, token, channel] == pytest.approx(integers(group, 2)[token % 32], abs=1e-3)
        group = np.array(layer.values)[0, 1, SINKS + token].reshape(-1, 32)[channel // 32]
        assert values[0, 1, token, channel] == pytest.approx(integers(group, 2)[channel % 32], abs=1e-3)
    assert formula.bits(2, 64) == (3, 3)


def balance(tile):
    """KVarN's scales of columns and rows, in loops over both."""
    tokens, dim = tile.shape
    columns, rows_, best = [0.0] * dim, [0.0] * tokens, (math.inf, None)
    scaled = lambda t, d: tile[t, d] * math.exp(-columns[d] - rows_[t])  # noqa: E731
    for _ in range(peers.KVARN_ROUNDS + 1):
        by_column = [np.std([scaled(t, d) for t in range(tokens)]) for d in range(dim)]
        by_row = [np.std([scaled(t, d) for d in range(dim)]) for t in range(tokens)]
        spread = max(by_column) / min(by_column) + max(by_row) / min(by_row)
        if spread < best[0]:
            best = spread, (np.exp(columns), np.exp(rows_))
        columns[:] = [c + math.log(s) for c, s in zip(columns, by_column, strict=True)]
        by_row = [np.std([scaled(t, d) for d in range(dim)]) for t in range(tokens)]
        rows_[:] = [r + math.log(s) for r, s in zip(rows_, by_row, strict=True)]
    return best[1]


@pytest.mark.parametrize("by_channel", [True, False])
def test_kvarn_balances_tokens_and_channels(by_channel):
    tile = normal(24, 16) * np.exp(RANDOM.standard_normal((24, 1))).astype(np.float32) * 8
    turned = tile @ hadamard(16)
    columns, rows_ = balance(turned)
    balanced = turned / columns / rows_[:, None]
    lines = balanced.T if by_channel else balanced
    codes = np.array([integers(line, 3) for line in lines])
    expected = (codes.T if by_channel else codes) * columns * rows_[:, None] @ hadamard(16).T
    found = np.array(peers.kvarn_tile(mx.array(tile), 3, by_channel=by_channel))
    assert np.abs(found - expected).max() < 0.01 * np.abs(tile).max()
    assert balanced.std(axis=0) == pytest.approx(np.ones(16), abs=0.05)


def test_kvarn_stores_zeros_and_large_means():
    tile = mx.array(normal(32, 16)) * 1e-3
    tile[:, 3] = 0
    for tiles in (tile, mx.zeros((32, 16)), tile + 100):
        found = peers.kvarn_tile(tiles, 4, by_channel=True)
        assert mx.abs(found - tiles).max() <= 0.1 * mx.abs(tiles).max()


def test_oscar_by_token_divides_keys_by_the_norm_of_all_heads():
    keys = normal(1, 2, 1, 32, 16) * np.exp(RANDOM.standard_normal((1, 1, 1, 32, 1))).astype(np.float32)
    found = np.array(peers.token_scaled_keys(mx.array(keys), 2, 32)) @ hadamard(16)
    turned = keys @ hadamard(16)
    norms = [float(np.float16(math.sqrt(sum(float(x) ** 2 for x in turned[0, :, 0, t].ravel())))) for t in range(32)]
    for head, channel in ((0, 0), (1, 9)):
        group = [turned[0, head, 0, t, channel] / norms[t] for t in range(32)]
        expected = [code * norm for code, norm in zip(integers(group, 2), norms, strict=True)]
        assert found[0, head, 0, :, channel] == pytest.approx(expected, abs=2e-3 * max(norms))


def test_oscar_by_covariance_is_a_rotation_that_levels_what_queries_read():
    queries = normal(500, 16, spread=2)
    covariance = queries.T @ queries / 500
    rotation = peers.oscar_rotation(covariance)
    assert np.allclose(rotation @ rotation.T, np.eye(16), atol=1e-6)
    assert np.diag(rotation.T @ covariance @ rotation) == pytest.approx(np.trace(covariance) / 16)
    assert peers.bit_reversed(8).tolist() == [0, 4, 2, 6, 1, 5, 3, 7]
    clipped = np.array(peers.clip_tokens(mx.array(queries), 0.9))
    limits = np.quantile(np.abs(queries), 0.9, axis=1)
    assert np.allclose(clipped, np.clip(queries, -limits[:, None], limits[:, None]), atol=1e-5)


def test_groups_take_the_widths_that_lose_least():
    widths = sorted_pairs.choose_widths(np.array([64.0, 4.0, 4.0, 0.25]), 8, sorted_pairs.lloyd_codeword)
    assert widths == (4, 2, 2, 0)
    assert sorted_pairs.choose_widths(np.ones(4), 8, sorted_pairs.lloyd_codeword) == (2, 2, 2, 2)


def test_sorted_pairs_stay_whole_and_lose_less_of_what_queries_read():
    layer = rows(dim=64)
    layer = LayerRows(0, 0, layer.pairs, mx.array(normal(1, 4, 384, 64, spread=1.5)), layer.keys, layer.values)
    losses = []
    for fixed in ((2, 2, 2, 2), ()):
        keys = sorted_pairs.SortedKeys(None, 8, sorted_pairs.lloyd_codeword, fixed=fixed)
        error = np.array(keys(layer) - layer.keys[:, :, SINKS : layer.stop])
        queries = np.array(layer.queries).reshape(2, -1, 64)
        losses.append(sum(np.square(queries[h] @ error[0, h].T).mean() for h in range(2)))
    assert losses[1] < 0.8 * losses[0]
    head = sorted_pairs.first_statistics(layer, 0)[0]
    plan = sorted_pairs.plan_groups(head, layer.pairs, 4, 8, sorted_pairs.lloyd_codeword)
    assert sorted(plan.order) == list(range(64))
    assert (np.abs(np.diff(plan.order.reshape(-1, 2))) == 32).all()


def test_attention_in_steps_reads_rounded_rows_behind_the_window_only():
    layer = rows()
    exact = mx.fast.scaled_dot_product_attention(layer.queries, layer.keys, layer.values, scale=0.25, mask="causal")
    parts = [side[:, :, SINKS : layer.stop] for side in (layer.keys, layer.values)]
    assert mx.abs(attend_in_steps(layer, *parts, 0.25) - exact).max() < 1e-5
    changed = attend_in_steps(layer, parts[0], parts[1] + 1, 0.25)
    differences = mx.abs(changed - exact).max(axis=(0, 1, 3))
    assert differences[:256].max() < 1e-5
    assert differences[256:].min() > 1e-3
    assert [rounded_until(step) for step in (0, 1, 2, 3)] == [SINKS, SINKS, 192, 320]


@pytest.mark.full
def test_a_format_of_the_package_diverges_as_in_its_cache():
    model, tokenizer = load(dtype="float32")
    chunk = cut_chunks(tokenizer, load_text(), 1, 512)[0]
    cached = score_text(model, [chunk], [parse_arm("tq2/tq2", sinks=32, window=64)], 128)[1]
    reader, ids = Reader(model), mx.array([chunk[:-1]])
    formula = peer_frontier.package_formula("tq2/tq2")
    blocks = peer_frontier.measure(reader, ids, reader.exact(ids), [formula])[0]
    kld = np.concatenate([np.repeat(blocks[0, :-1], 64), np.repeat(blocks[0, -1], 63)])
    assert kld.mean() == pytest.approx(cached.kld.mean(), rel=0.03)
