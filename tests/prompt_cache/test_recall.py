"""What left comes back to the bit, at its positions; the archive leaves nothing behind and damages nothing."""

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from cache.tools import MODEL, make_spec
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import trim_prompt_cache

from mlx_tq.codec.formats import CodecOptions, format_names, get_format
from mlx_tq.codec.normalization import decode_keys
from mlx_tq.config import BLOCK, Budget, EvictConfig, KVConfig
from mlx_tq.errors import CacheFormatError, ConfigError
from mlx_tq.policies.selection import PositionRange
from mlx_tq.prompt_cache.archive import ArchivedBlock
from mlx_tq.prompt_cache.build import make_cache
from mlx_tq.prompt_cache.cache_file import load_prompt_cache, save_prompt_cache
from mlx_tq.prompt_cache.layer_group import EvictionPlan, LayerGroup, layer_group_of
from mlx_tq.prompt_cache.recall import blocks_of_ranges, min_score, positions_of

from .stored import KEYS, LAYERS, append, evicted, layers


def formats(dim, *, keys):
    """The formats that store vectors of this size."""
    found = []
    for name in format_names():
        try:
            get_format(name).codec(dim, CodecOptions(), mx.float16)
        except ConfigError:
            continue
        if keys or not get_format(name).keys_only:
            found.append(name)
    return found


def assert_same_rows(caches, others):
    for cache, other in zip(caches, others, strict=True):
        assert cache.positions.tolist() == other.positions.tolist()
        rows, _, known = cache.packed_rows()
        wanted, _, expected = other.packed_rows()
        count = other.packed_tokens
        assert cache.packed_tokens == count
        assert np.array_equal(np.array(rows[:, :, :count]), np.array(wanted[:, :, :count]))
        if expected is not None:
            assert np.array_equal(np.array(known.row_means(count)), np.array(expected.row_means(count)))


def forget_originals(cache):
    """Drop the originals of packed tokens, as a round does."""
    cache.replace_packed(cache.packed_rows()[0], cache.packed_positions)


def through_file(caches, damage=lambda data: data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kept.safetensors"
        save_prompt_cache(path, caches, model=MODEL, config=KVConfig())
        path.write_bytes(damage(path.read_bytes()))
        return load_prompt_cache(path, model=MODEL).caches


@pytest.mark.parametrize("count", [6, pytest.param(40, marks=pytest.mark.full)])
def test_all_that_left_comes_back_to_the_bit(count):
    """After any rounds, in every format: rows, means and positions are those of a cache that lost nothing."""
    cases = given(
        key=st.sampled_from(formats(128, keys=True)),
        value=st.sampled_from(formats(64, keys=False)),
        normalize=st.booleans(),
        sinks=st.sampled_from([0, 5, 32]),
        granularity=st.sampled_from([1, 16, 32]),
        step=st.sampled_from([1, 7, 100]),
        way=st.sampled_from(["as it is", "fork", "part by part", "file"]),
    )
    settings(max_examples=count, deadline=None, derandomize=True)(cases(check_all_comes_back))()


def check_all_comes_back(key, value, normalize, sinks, granularity, step, way):
    spec = make_spec(key, value, sinks=sinks, window=20, normalize=normalize)
    plain, caches = layers(spec), layers(spec, sinks + 60, f"random:trigger=8:granularity={granularity}")
    for first, last in ((0, 300), (300, 333)):
        for each in (plain, caches):
            append(each, first, last, max(step, 20) if last == 300 else step)
        sequence = layer_group_of(caches)
        if way == "fork":
            caches = [cache.fork() for cache in caches]
            sequence = layer_group_of(caches)
        if way == "file":
            caches = through_file(caches)
            sequence = layer_group_of(caches)
        assert sequence.stats.tokens
        gone = set(range(caches[0].offset)) - set(caches[0].positions.tolist())
        assert sorted(p for block in sequence.archived for p in block.positions.tolist()) == sorted(gone)
        parts = [[block] for block in reversed(sequence.archived)] if way == "part by part" else [sequence.archived]
        assert sum(sequence.recall(caches, part) for part in parts) == len(gone)
        assert_same_rows(caches, plain)
        evicted = sequence.stats.tokens
        sequence.drop_recalled(caches)
        assert set(range(caches[0].offset)) - set(caches[0].positions.tolist()) == gone
        assert (sequence.stats.tokens, len(sequence.recalled)) == (evicted, 0)


SLOW = {"tcq2", "tcq4", "tq25", "tbq3_0", "tbq4_0"}  # of the kinds that tcq3, tq35 and tq3_0 are


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name in SLOW)) for name in format_names()]
)
def test_rows_of_each_format_come_back(name):
    key = name if name in formats(128, keys=True) else "q8"
    value = name if name in formats(64, keys=False) else "tq4"
    assert name in (key, value)
    spec = make_spec(key, value, sinks=4, window=20, normalize=key == name)
    plain, caches = layers(spec), layers(spec, 64, "random:trigger=8:granularity=16")
    for each in (plain, caches):
        append(each, 0, 333, 37)
    sequence = layer_group_of(caches)
    assert sequence.recall(caches, sequence.archived) == sequence.stats.tokens > 200
    assert_same_rows(caches, plain)


@pytest.mark.parametrize("cold", ["tq2", "q8_0", "fp16"])  # of the same rotation, of another size, of none
@pytest.mark.parametrize("normalize", [False, True])
def test_of_two_formats_the_second_leaves_and_is_scored_as_what_it_was(cold, normalize):
    """Also by layers beside those of one format, which lose the same tokens."""
    spec = make_spec(f"tq4~{cold}", "tq4", sinks=4, window=20, recent=64, normalize=normalize)
    one = make_spec("tq4", "tq4", sinks=4, window=20, normalize=normalize)
    kept = layers(spec)
    config = EvictConfig("random:trigger=8:granularity=16", recall="auto")
    sequence = LayerGroup(EvictionPlan(config, Budget(tokens=250), LAYERS), {})
    caches = [make_cache(spec, 0, sequence), make_cache(one, 1, sequence)]
    for each in (kept, caches):
        append(each, 0, 520, 37)
    sequence = layer_group_of(caches)
    recent = caches[0].positions[-84:]
    assert (np.diff(recent) == 1).all()
    gone = np.concatenate([block.positions for block in sequence.archived])
    assert len(gone) > 100
    words, means = sequence.archive.read_keys(sequence.archived, 0)
    counts = [len(block.positions) for block in sequence.archived]
    known = caches[0].archived_normalization(means, mx.array(np.repeat(np.arange(len(counts)), counts), mx.int32))
    key = caches[0].evictable_rows()[1].key
    found = decode_keys(key, caches[0].evictable_rows()[1].split_keys(mx.array(words)[None]), known)
    wanted = kept[0].keys_and_values()[0].view.cold_keys()[:, :, mx.array(gone - 4)]
    rounding = 2.0**-11 * float(mx.abs(wanted).max()) if normalize else 0
    assert float(mx.abs(found - wanted).max()) <= 4 * rounding + 2.0**-20 * float(mx.abs(wanted).max())
    sequence.recall(caches, sequence.archived)
    assert_same_rows(caches[:1], kept[:1])


def test_recalled_rows_stay_through_a_round_and_are_not_counted():
    caches, sequence = evicted()
    live = caches[0].size()
    chosen = sequence.archived[1:3]
    count = sequence.recall(caches, chosen)
    back = [p for block in chosen for p in block.positions.tolist()]
    written = len(sequence.archived)
    append(caches, 300, 400, 20)
    assert set(back) <= set(caches[0].positions.tolist())
    assert caches[0].size() <= live + count + 40
    assert len(sequence.archived) > written
    assert len(sequence.evicted) == len(set(range(400)) - set(caches[0].positions.tolist()) | set(back))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    archived=st.sets(st.integers(0, 150)),
    live=st.sets(st.integers(0, 150)),
    spans=st.lists(st.tuples(st.integers(0, 140), st.integers(1, 40)), max_size=4),
    most=st.integers(0, 160),
)
def test_named_ranges_come_whole_or_not_at_all(archived, live, spans, most):
    """In the blocks that hold them and no others, the first of them first, and no more tokens than asked for."""
    archived -= live
    pieces = [sorted(p for p in archived if p // 32 == number) for number in range(5)]
    blocks = [ArchivedBlock(np.array(piece), 0, 0, 0, lambda: None) for piece in pieces if piece]
    missing = [set(range(start, start + count)) - live for start, count in spans]
    chosen = blocks_of_ranges(blocks, [(start, start + count) for start, count in spans], np.array(sorted(live)), most)
    back = set(positions_of(chosen).tolist())
    assert len(back) == sum(len(block.positions) for block in chosen) <= most
    whole = set().union(*(each for each in missing if each <= back))
    assert all(whole & set(block.positions.tolist()) for block in chosen)
    first = next((each for each in missing if each and each <= archived), set())
    holding = [block.positions for block in blocks if first & set(block.positions.tolist())]
    assert first <= back or sum(map(len, holding)) > most


def test_a_damaged_block_is_left_out(tmp_path):
    caches, sequence = evicted()
    archive, first = sequence.archive, sequence.archived[0]
    archive.settle()
    os.pwrite(archive._file, b"\x00\x01", first.start + first.nbytes - 2)
    others = sum(len(block.positions) for block in sequence.archived[1:])
    assert sequence.recall(caches, sequence.archived) == others
    assert first not in sequence.archived
    assert not set(first.positions.tolist()) & set(caches[0].positions.tolist())


def test_of_a_damaged_file_the_other_blocks_come_back():
    caches, sequence = evicted()
    blocks = len(sequence.archived)
    loaded = layer_group_of(through_file(caches, lambda data: data[:-9] + b"?" + data[-8:]))
    assert len(loaded.archived) == blocks - 1
    assert loaded.archive.take_warning() == (
        "1 block of the archive is damaged: what it held cannot be recalled. The conversation continues."
    )


def test_a_block_that_cannot_be_read_is_all_that_a_saved_conversation_lacks():
    caches, sequence = evicted()
    last = max(sequence.archived, key=lambda block: block.start)
    sequence.archive.settle()
    os.ftruncate(sequence.archive._file, last.start + last.nbytes // 2)
    loaded = layer_group_of(through_file(caches))
    assert positions_of(loaded.archived).tolist() == positions_of({*sequence.archived} - {last}).tolist()
    assert "1 block of the archive is damaged" in loaded.archive.take_warning()


def test_rows_that_are_back_when_a_conversation_is_saved_come_no_second_time():
    caches, sequence = evicted()
    live = caches[0].positions.tolist()
    sequence.recall(caches, sequence.archived[1:3])
    loaded = through_file(caches)
    again = layer_group_of(loaded)
    assert again.recalled.tolist() == sequence.recalled.tolist()
    again.replace_recalled(loaded, again.archived[2:4])
    assert loaded[0].positions.tolist() == sorted([*live, *positions_of(again.archived[2:4])])
    again.drop_recalled(loaded)
    assert loaded[0].positions.tolist() == live


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    key=st.sampled_from(["q8", "tq4"]),
    granularity=st.sampled_from([1, 16, 32]),
    step=st.sampled_from([21, 70]),
    share=st.floats(0.05, 1),
    seed=st.integers(0, 99),
    way=st.sampled_from(["as it is", "fork", "file"]),
)
def test_what_left_at_the_limit_never_comes_back_and_the_rest_is_exact(key, granularity, step, share, seed, way):
    """Rows and positions that return are those of a cache that lost nothing, where others left, also while back."""
    rng = np.random.default_rng(seed)
    spec = make_spec(key, "tq4", sinks=4, window=20)
    plain, caches, free = layers(spec), *(layers(spec, 64, f"random:trigger=8:granularity={granularity}") for _ in "12")
    append(plain, 0, 210, 70)
    append(free, 0, 210, step)
    sequence, stale = layer_group_of(caches), []
    limit = int(share * layer_group_of(free).archive.nbytes)
    sequence.plan = replace(sequence.plan, config=replace(sequence.plan.config, archive_limit=limit))
    for first, last in ((0, 165), (165, 190), (190, 210)):
        append(caches, first, last, step)
        sequence.drop_recalled(caches)
        if chosen := [block for block in sequence.archived if rng.random() < 0.3]:
            sequence.recall(caches, chosen)
        stale += sequence.archived
    sequence.drop_recalled(caches)
    assert share > 0.9 or sequence.archive.deleted + sequence.archive.lost
    if way != "as it is":
        caches = through_file(caches) if way == "file" else [cache.fork() for cache in caches]
        sequence = layer_group_of(caches)
    sequence.archive.settle()
    assert sequence.archive.nbytes <= limit
    live = caches[0].positions.tolist()
    left = [block for block in sequence.archived if not block.lost]
    kept = [p for block in left for p in block.positions.tolist()]
    assert sequence.recall(caches, [*left, *(block for block in stale if block.lost)]) == len(kept)
    assert caches[0].positions.tolist() == sorted([*live, *kept])
    rows = [[np.array(cache.packed_rows()[0]) for cache in each] for each in (caches, plain)]
    at = np.isin(plain[0].packed_positions, caches[0].packed_positions)
    for mine, wanted in zip(*rows, strict=True):
        assert np.array_equal(mine[:, :, : at.sum()], wanted[:, :, : len(at)][:, :, at])


def test_what_made_room_while_it_was_back_is_archived_again_and_counts_are_saved():
    """Its rows were in the cache; what was asked for once stays longest, also in a conversation that is loaded."""
    spec = make_spec("tq4", "tq4", sinks=4, window=20)
    plain, caches = layers(spec), layers(spec, 90, "recency:trigger=8:granularity=32")
    append(plain, 0, 400, 20)
    append(caches, 0, 300, 20)
    sequence = layer_group_of(caches)
    chosen = sequence.archived[1:3]
    sequence.recall(caches, chosen)
    for block in chosen:
        block.delete()
    wanted = positions_of(chosen).tolist()
    append(caches, 300, 400, 20)
    assert set(wanted) <= set(caches[0].positions.tolist())
    sequence.drop_recalled(caches)
    for each in (caches, through_file(caches)):
        sequence = layer_group_of(each)
        again = [block for block in sequence.archived if block.recalls]
        assert positions_of(again).tolist() == wanted
        assert {block.recalls for block in again} == {1}
        sequence.recall(each, sequence.archived)
        assert_same_rows(each, plain)


def test_without_a_file_the_conversation_goes_on(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    caches, sequence = evicted()
    assert "no file can be made in /dev/null/mlx_tq: Not a directory" in sequence.archive.take_warning()
    assert (sequence.archived, sequence.archive.take_warning()) == ((), None)
    assert caches[0].size() < 300


@pytest.mark.full
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    key=st.sampled_from(formats(128, keys=True)),
    normalize=st.booleans(),
    sinks=st.sampled_from([0, 5, 32]),
    window=st.sampled_from([20, 70]),
    granularity=st.sampled_from([1, 16, 32]),
    share=st.floats(0, 1, exclude_max=True),
    back=st.booleans(),
    copied=st.booleans(),
)
def test_a_trim_past_evictions(key, normalize, sinks, window, granularity, share, back, copied):
    """Rows, means and positions are those of a cache that lost nothing, trimmed likewise; what is gone is archived.

    By mlx-lm's function, which trims layer by layer, also copies that are no sequence again yet.
    """
    normalize = normalize or bool(get_format(key).unsorted)
    spec = make_spec(key, "tq4", sinks=sinks, window=window, normalize=normalize)
    plain = layers(spec)
    caches = layers(spec, sinks + window + 40, f"random:trigger=8:granularity={granularity}")
    for each in (plain, caches):
        append(each, 0, 333, 37)
    sequence = layer_group_of(caches)
    if back:
        sequence.recall(caches, sequence.archived[::2])
    length = int(share * sequence.archived[-1].positions[-1])
    if copied:
        caches = [cache.fork() for cache in caches]
    assert trim_prompt_cache(caches, 333 - length) == 333 - length
    sequence = layer_group_of(caches)
    for cache in plain:
        forget_originals(cache)
        cache.trim(333 - length)
    live, archived = caches[0].positions.tolist(), [p for each in sequence.archived for p in each.positions.tolist()]
    assert set(range(max(0, length - window), length)) <= set(live)
    assert sorted({*live, *archived}) == list(range(length)) == list(range(caches[0].offset))
    assert set(live) & set(archived) == set(sequence.recalled.tolist())
    assert sequence.stats.tokens == len(archived) == len(sequence.evicted)
    sequence.drop_recalled(caches)
    assert sorted([*caches[0].positions.tolist(), *archived]) == list(range(length))
    for more in (0, 90):
        for each in (plain, caches):
            append(each, length, length + more, 45)
        sequence.recall(caches, sequence.archived)
        assert_same_stored(caches, plain)
        sequence.drop_recalled(caches)


def test_what_a_trim_brought_back_is_forgotten_once_other_tokens_are_read():
    """The block in which it ended holds other tokens when the next trim asks for it."""
    spec = make_spec("tq4", "tq4", sinks=4, window=60)
    plain, caches = layers(spec), layers(spec, 90, "recency:trigger=8:granularity=32")
    for length in (150, 155):
        for each in (plain, caches):
            append(each, each[0].offset, 300, 20, other=length)
        for cache in plain:
            forget_originals(cache)
        for each in (plain, caches):
            trim_prompt_cache(each, 300 - length)
    sequence = layer_group_of(caches)
    sequence.recall(caches, sequence.archived)
    assert_same_stored(caches, plain)


def assert_same_stored(caches, others):
    """Rows as they are packed, and what is beside them in the model's type."""
    if others[0].packed_tokens:
        assert_same_rows(caches, others)
    for cache, other in zip(caches, others, strict=True):
        count = other.size() - other.packed_tokens
        for one, two in zip(cache._full or (), other._full or (), strict=True):
            assert np.array_equal(np.array(one[:, :, :count]), np.array(two[:, :, :count]))


@pytest.mark.parametrize("every", [1, 2])
def test_a_trim_past_evictions_without_the_rows_is_refused(every):
    """Where nothing was archived, and where all blocks or some are damaged; nothing is trimmed then, or comes back."""
    spec = make_spec("tq4", "tq4", sinks=4, window=60)
    lossy, damaged = (layers(spec, 90, "recency:trigger=8:granularity=1") for _ in "12")
    config = EvictConfig("recency:trigger=8:granularity=1", recall="off")
    layer_group_of(lossy).plan = replace(layer_group_of(lossy).plan, config=config)
    for caches in (lossy, damaged):
        append(caches, 0, 300, 20)
    sequence = layer_group_of(damaged)
    sequence.archive.settle()
    for block in sequence.archived[::every]:
        os.pwrite(sequence.archive._file, b"\xff\x00\xff\x00", block.start + block.nbytes - 4)
    for caches in (lossy, damaged):
        live = caches[0].positions.tolist()
        with pytest.raises(CacheFormatError, match=r"a trim of 150 tokens from 300 .* not in the archive\. Trim at"):
            trim_prompt_cache(caches, 150)
        assert [cache.offset for cache in caches] == [300, 300]
        assert caches[0].positions.tolist() == live


def asked_by_a_key(spec, place):
    """Return caches of all tokens, and their group, which heard the key of the token at `place` as its query."""
    caches = layers(spec, 65, "random:trigger=8:granularity=32")
    append(caches, 0, len(KEYS[0, 0]), 100)
    sequence = layer_group_of(caches)
    sequence.capture_queries(range(LAYERS), rounds=False)
    for number in range(LAYERS):
        sequence.listeners(number, 0, 0)[0].notify(mx.roll(KEYS, number, axis=-1)[:, :, place : place + 1], 0.5, None)
    return caches, sequence


@settings(max_examples=24, deadline=None, derandomize=True)
@given(place=st.integers(64, 500), normalize=st.booleans())
def test_a_block_comes_with_its_neighbour_on_the_side_of_the_token_that_was_asked_for(place, normalize):
    spec = make_spec("q8", "tq4", sinks=5, window=20, normalize=normalize)
    caches, sequence = asked_by_a_key(spec, place)
    number, inside = divmod(place - spec.sinks, BLOCK)
    wanted = {number, number + (1 if inside >= BLOCK / 2 else -1)}
    there = {(int(block.positions[0]) - spec.sinks) // BLOCK for block in sequence.archived}
    found = sequence.search_archive(caches, 1, 2 * BLOCK).blocks
    blocks = [(int(block.positions[0]) - spec.sinks) // BLOCK for block in found]
    if number in there:
        assert blocks[0] == number
        assert wanted & there <= set(blocks)


@settings(max_examples=24, deadline=None, derandomize=True)
@given(place=st.integers(64, 500), before=st.integers(0, 32), behind=st.integers(1, 32))
def test_a_block_comes_with_the_neighbors_that_have_the_rest_of_its_passage(place, before, behind):
    spec = make_spec("q8", "tq4", sinks=5, window=20)
    caches, sequence = asked_by_a_key(spec, place)

    def passage_at(position):
        return PositionRange(position - before, position + behind)

    number = (place - spec.sinks) // BLOCK
    wanted = {(position - spec.sinks) // BLOCK for position in range(place - before, place + behind)}
    there = {(int(block.positions[0]) - spec.sinks) // BLOCK for block in sequence.archived}
    for limit in (BLOCK, 3 * BLOCK):
        found = sequence.search_archive(caches, 1, limit, passage_at=passage_at)
        blocks = [(int(block.positions[0]) - spec.sinks) // BLOCK for block in found.blocks]
        if number in there:
            assert blocks[0] == number
            assert limit == BLOCK or wanted & there <= set(blocks)
            assert found.passages[0] == passage_at(place)


@settings(max_examples=16, deadline=None, derandomize=True)
@given(places=st.lists(st.integers(0, 13), min_size=1, max_size=3, unique=True), most=st.sampled_from([64, 512]))
def test_what_no_token_of_the_question_singles_out_stays_away_though_there_is_room(places, most):
    """A token asks for each of these blocks by the very key of one of its tokens; nothing asks for the others."""
    spec = make_spec("q8", "tq4", sinks=5, window=20)
    caches = layers(spec, 65, "random:trigger=8:granularity=32")
    append(caches, 0, len(KEYS[0, 0]), 100)
    sequence = layer_group_of(caches)
    asked_for = [spec.sinks + BLOCK * place + 20 for place in places]  # what lies behind goes on in the next block
    sequence.capture_queries(range(LAYERS), rounds=False)
    for number in range(LAYERS):
        sequence.listeners(number, 0, 0)[0].notify(mx.roll(KEYS, number, axis=-1)[:, :, mx.array(asked_for)], 2.0, None)
    there = {(int(block.positions[0]) - spec.sinks) // BLOCK for block in sequence.archived}
    wanted = {place for place in places if place in there}
    found = sequence.search_archive(caches, len(places), most).blocks
    blocks = [(int(block.positions[0]) - spec.sinks) // BLOCK for block in found]
    if most == 512 and wanted:
        assert wanted <= set(blocks) <= {place + side for place in wanted for side in (0, 1)}
    assert sum(len(block.positions) for block in found) <= most


def test_where_no_block_stands_out_more_come():
    """Of a best block that is certain six tenths are enough; of one that is half as certain three."""
    assert [min_score(best) for best in (1.0, 0.8)] == [0.6, 0.48]
    assert np.isclose(min_score(0.4) / 0.4, 0.3)
    assert min_score(0.0) == 0.0
