"""A layer of which each head keeps some rows of a document: what each holds, and attention over exactly that."""

import mlx.core as mx
import numpy as np
import pytest

from cache.tools import DIM, check_attention, copies, listen, make_spec, random, random_pair, same_bits
from mlx_tq.cache.batch import BatchCompressedKVCache, BatchView
from mlx_tq.cache.compacted import CompactedKVCache
from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.cache.view import StepView
from mlx_tq.config import KVConfig
from mlx_tq.errors import CacheFormatError, UnsupportedModelError
from mlx_tq.kernels import backend

HEADS, GROUP, DOCUMENT, TOTAL = 3, 2, 400, 620
SCALE = DIM**-0.5
KEYS, VALUES = random_pair(TOTAL, heads=HEADS, dtype=mx.float32)
QUERIES = random(TOTAL, heads=HEADS * GROUP, dtype=mx.float32, seed=5)
# Shares of the packed rows of each head: of some all, few and none.
SHARES = (1.0, 0.1, 0.0)


def read(cache, stop, step=64):
    while cache.offset < stop:
        start = cache.offset
        view = cache.append(*(x[:, :, start : min(start + step, stop)] for x in (KEYS, VALUES)))
        listen(view, start, cache.offset - start)
    return cache


def document(*, normalize=False):
    return read(CompressedKVCache(make_spec(normalize=normalize)), DOCUMENT)


def chosen(cache):
    rng = np.random.default_rng(3)
    return [np.flatnonzero(rng.random(cache.packed_tokens) < share) for share in SHARES]


def compacted(*, normalize=False):
    cache = document(normalize=normalize)
    return CompactedKVCache.from_cache(cache, chosen(cache))


def check_heads(view, queries, out):
    for head in range(HEADS):
        members = slice(head * GROUP, (head + 1) * GROUP)
        check_attention(StepView(view.regions.head(head)), queries[:, members], out[:, members], SCALE)


@pytest.mark.parametrize("name", ["cpu", "reference"])
@pytest.mark.parametrize("normalize", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize(
    ("length", "stride"), [(1, 13), pytest.param(1, 2, marks=pytest.mark.full), (7, 14), (150, 300)]
)
def test_each_head_sees_its_rows_and_all_that_follow(normalize, length, stride, name):
    plain, cache = document(normalize=normalize), compacted(normalize=normalize)
    kept = [plain.packed_positions[index] for index in chosen(plain)]
    with backend.using(name):
        for stop in range(DOCUMENT + length, TOTAL, stride):
            read(cache, stop - length, 50)
            read(plain, stop - length, 50)
            new = slice(stop - length, stop)
            views = [each.append(KEYS[:, :, new], VALUES[:, :, new]) for each in (cache, plain)]
            if length != 7:  # a block may be packed in the middle of a short pass
                check_heads(views[0], QUERIES[:, :, new], views[0].attend(QUERIES[:, :, new], SCALE, "causal", None))
            for head, (positions, of_document) in enumerate(zip(cache.positions, kept, strict=True)):
                assert np.isin(of_document, positions).all()
                assert np.isin(np.arange(DOCUMENT - cache.spec.window, stop), positions).all()
                stored = [np.array(x)[0, 0] for x in views[0].regions.head(head).decode()]
                whole = [np.array(x)[0, head] for x in views[1].regions.decode()]
                assert all(np.array_equal(x, y[positions]) for x, y in zip(stored, whole, strict=True)), "the same bits"
    assert cache.size() == max(map(len, cache.positions))


def test_all_rows_are_the_cache_itself():
    plain = document(normalize=True)
    cache = CompactedKVCache.from_cache(plain, [np.arange(plain.packed_tokens)] * HEADS)
    for stop in (DOCUMENT + 1, DOCUMENT + 90, TOTAL):
        new = slice(cache.offset, stop)
        outputs = [
            each.append(KEYS[:, :, new], VALUES[:, :, new]).attend(QUERIES[:, :, new], SCALE, "causal", None)
            for each in (cache, plain)
        ]
        assert mx.allclose(*outputs, atol=2e-6, rtol=0)


@pytest.mark.parametrize("normalize", [False, True])
def test_copies_and_files_go_on_alike(normalize, tmp_path):
    cache = read(compacted(normalize=normalize), DOCUMENT + 70, 9)
    config = KVConfig(sinks=4, window=24, normalize=normalize)
    twins = copies(cache, config, tmp_path / "cache.safetensors")
    assert all(same_bits(twin.state, cache.state) for twin in twins)
    for each in (cache, *twins):
        read(each, TOTAL, 8)
    assert all(same_bits(twin.state, cache.state) for twin in twins)


def test_a_copy_does_not_change_the_cache():
    cache = compacted()
    before = cache.state
    twin = read(cache.fork(), TOTAL)
    assert same_bits(before, cache.state)
    assert twin.trim(TOTAL - DOCUMENT - 70) == TOTAL - DOCUMENT - 70
    assert same_bits(read(twin, TOTAL).state["heads"], read(cache, TOTAL).state["heads"])


def test_only_what_followed_can_be_trimmed():
    cache = read(compacted(), DOCUMENT + 40)
    with pytest.raises(CacheFormatError, match=r"a trim of 200 .* were compacted. Trim at most \d+, or prefill"):
        cache.trim(200)
    assert cache.offset == DOCUMENT + 40


def test_a_batch_mixes_it_with_others():
    rows = [read(compacted(), DOCUMENT + 33), read(document(), DOCUMENT + 90)]
    views = [row.append(*(x[:, :, row.offset : row.offset + 1] for x in (KEYS, VALUES))) for row in rows]
    queries = random(1, batch=2, heads=HEADS * GROUP, dtype=mx.float32, seed=6)
    together = BatchView(views, [1, 1], (HEADS, DIM), (HEADS, DIM)).attend(queries, SCALE, None, None)
    check_heads(views[0], queries[:1], together[:1])
    check_attention(views[1], queries[1:], together[1:], SCALE)


def test_the_state_of_a_batch_has_all_rows():
    row = read(compacted(), DOCUMENT + 40)
    twin = row.fork()
    batch = BatchCompressedKVCache.merge([row])
    read(twin, TOTAL)
    (loaded,) = BatchCompressedKVCache.from_state(batch.state).rows
    assert same_bits(loaded.state, row.state)
    assert same_bits(read(loaded, TOTAL).state, twin.state)


def test_bytes_and_damaged_states():
    plain, cache = document(), compacted()
    assert cache.nbytes < 0.6 * plain.nbytes
    state = cache.state
    for change in (
        {"heads": state["heads"][:2]},
        {"heads": []},
        {"rows": state["heads"][0]["rows"]},
        {"retained": mx.array([8]), "evicted": state["evicted"] - 1},
        {"heads": [*state["heads"][:2], {"positions": mx.array([8, 7])}]},
        {"heads": [{**state["heads"][0], "rows": state["heads"][0]["rows"][:, :, 1:]}, *state["heads"][1:]]},
        {"heads": [{**state["heads"][0], "positions": mx.array([DOCUMENT])}, *state["heads"][1:]]},
    ):
        with pytest.raises(CacheFormatError, match="contradicts itself"):
            CompactedKVCache.from_state({**state, **change})


def test_what_has_no_array_is_refused():
    cache = compacted()
    for ask in (lambda: cache.make_mask(4, return_array=True), lambda: cache.keys_and_values()[0].materialize()):
        with pytest.raises(UnsupportedModelError, match="keep different"):
            ask()
