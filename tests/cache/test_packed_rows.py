"""Copies of a cache share their packed rows: held once, never written again, and read as if each had its own."""

import mlx.core as mx
import pytest

from cache.tools import DIM, contents, feed, filled, make_spec, queries_at, random_pair, same_bits
from mlx_tq.cache import packed_rows
from mlx_tq.cache.batch import BatchCompressedKVCache
from mlx_tq.cache.packed_rows import PackedRows, row_capacity
from mlx_tq.config import BLOCK

SHARED, COPIES = 400, 20
SPECS = {
    "plain": make_spec(),
    "normalized": make_spec("tq4", normalize=True),
    "two formats": make_spec(key="tq4~tq3", value="tq4", recent=64),
}
TOKENS = [random_pair(SHARED + 200, seed=seed) for seed in range(3)]
BEGINNING = [x[:, :, :SHARED] for x in TOKENS[0]]


def own(seed):
    """The beginning that all have, and tokens of one's own."""
    return [mx.concatenate([x, y[:, :, SHARED:]], axis=2) for x, y in zip(BEGINNING, TOKENS[seed], strict=True)]


def alone(cache):
    """The same cache, which shares nothing."""
    return type(cache).from_state(cache.state)


def reads_alike(cache, other):
    """Both see the same, to the bit, with one query and with many."""
    for count in (1, 40):
        keys, values = (x[:, :, :count] for x in TOKENS[2])
        mask = "causal" if count > 1 else None
        queries = queries_at(cache.offset, count)
        outs = [each.fork().append(keys, values).attend(queries, DIM**-0.5, mask, None) for each in (cache, other)]
        assert mx.array_equal(*outs)
    assert all(mx.array_equal(a, b) for a, b in zip(contents(cache), contents(other), strict=True))
    assert same_bits(cache.state, other.state)
    assert same_bits(alone(cache).state, type(cache).from_state(cache.state_in_place).state)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_copies_go_on_apart_and_read_what_they_share(spec, monkeypatch):
    """Over five turns, each from a copy of the one before that stays; then back to what all have."""
    monkeypatch.setattr(packed_rows, "MIN_SHARED", BLOCK)
    first = filled(spec, *BEGINNING)
    whole = alone(first)
    shared, kept = [first], []
    for turn in range(6):
        cache = shared[-1].fork()
        feed(cache, *own(1), [33])
        shared.append(cache)
        kept.append(alone(cache))
        assert len(cache._rows._shared) <= packed_rows.MAX_SHARED_BUFFERS, turn
    assert len(shared[1]._rows._shared) == (0 if spec.cold else 1)
    other = first.fork()
    feed(other, *own(2), [100])
    assert not same_bits(other.state, shared[3].state)
    for cache, expected in zip((first, *shared[1:]), (whole, *kept), strict=True):
        reads_alike(cache, expected)
    back, expected = shared[-1].fork(), alone(shared[-1])
    for cache in (back, expected):
        cache.trim(150)
        feed(cache, *own(2), [70])
    reads_alike(back, expected)
    reads_alike(shared[-1], kept[-1])
    whole.trim(200)
    first.trim(200)
    assert sum(piece.tokens for piece in first._rows.shared(first.packed_tokens)) <= first.packed_tokens
    reads_alike(first, whole)


def test_a_batch_holds_once_what_its_rows_begin_with():
    first = filled(SPECS["plain"], *BEGINNING)
    batch = BatchCompressedKVCache.merge([first] * COPIES)
    rows = [alone(first) for _ in range(COPIES)]
    assert batch.nbytes < 2 * first.nbytes + COPIES * (first.nbytes - first.packed_nbytes)
    for _ in range(2 * BLOCK):
        keys, values = (x[:, :, first.offset : first.offset + 1] for x in TOKENS[1])
        key, _ = batch.update_and_fetch(*(mx.repeat(x, COPIES, axis=0) for x in (keys, values)))
        views = [row.append(keys, values) for row in rows]
    out = key.view.attend(mx.repeat(queries_at(0, 1), COPIES, axis=0), DIM**-0.5, None, None)
    mx.eval(out, batch.state)
    assert mx.allclose(out[3:4], views[3].attend(queries_at(0, 1), DIM**-0.5, None, None), rtol=2**-9, atol=2**-10)
    arrays = {id(array): array.nbytes for row in batch.rows for array in row._rows.arrays}
    once = first._rows.arrays[0].nbytes
    assert len(arrays) == COPIES + 1
    assert sum(arrays.values()) <= once + COPIES * 3 * BLOCK * once // row_capacity(first.packed_tokens)
    beside = sum(row.nbytes - sum(array.nbytes for array in row._rows.arrays) for row in batch.rows)
    assert batch.nbytes <= sum(arrays.values()) + beside


def test_rows_that_nobody_else_has_any_more_are_written_in_place():
    whole = PackedRows(mx.zeros((1, 1, 512, 2), mx.uint32))
    rows = mx.ones((1, 1, 288, 2), mx.uint32)
    twin = whole.fork()
    twin.write(rows, 300)
    assert [piece.tokens for piece in twin.shared(900)] == [300]
    whole.write(rows, 320)
    assert [piece.tokens for piece in whole.shared(900)] == [320], "the twin reads them"
    later = twin.fork()
    del twin
    later.write(rows, 588)
    assert [piece.tokens for piece in later.shared(900)] == [300], "its own rows nobody else has"
    assert mx.array_equal(later.between(290, 876)[0, 0, :, 0], mx.array([0] * 10 + [1] * 576))
    assert whole.between(0, 310).sum().item() == 0
