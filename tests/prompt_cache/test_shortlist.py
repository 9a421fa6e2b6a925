"""A look into a large archive: few layers score all of it, and all that look what these choose."""

import os
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from cache.tools import make_spec
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tq.cache.blocks import keys_start
from mlx_tq.config import BLOCK
from mlx_tq.prompt_cache import recall
from mlx_tq.prompt_cache.archive import Archive
from mlx_tq.prompt_cache.layer_group import layer_group_of
from mlx_tq.prompt_cache.recall import Search, count_scored_tokens, positions_of, scout_layers, shortlist_tokens

from .stored import KEYS, append, layers

LAYERS, SCOUT, PREFIX, TOKENS = 4, 2, 5, len(KEYS[0, 0])
SMALL = 5 * BLOCK


@pytest.fixture
def small(monkeypatch):
    """Five blocks are a shortlist."""
    monkeypatch.setattr(recall, "SHORTLIST", SMALL)


def keys_at(*places):
    return KEYS[:, :, mx.array(places)]


def evicted(asked):
    """A sequence that lost all but a few tokens, and its layers, which ask with these queries, by layer."""
    caches = layers(make_spec("q8", "tq4", sinks=PREFIX, window=20), 65, "recency:trigger=8:granularity=32", LAYERS)
    append(caches, 0, TOKENS, 100)
    sequence = layer_group_of(caches)
    sequence.archive.settle()
    sequence.capture_queries(asked, rounds=False)
    for number, queries in asked.items():
        sequence.listeners(number, 0, 0)[0].notify(mx.roll(queries, number, axis=-1), 2.0, None)
    return sequence, caches


def all_with(queries):
    return dict.fromkeys(range(LAYERS), queries)


def blocks_of(blocks):
    return [(int(block.positions[0]) - PREFIX) // BLOCK for block in blocks]


@pytest.mark.parametrize(
    ("numbers", "first"),
    [
        (range(7, 23), [15, 16, 17, 18]),
        (range(1, 5), [3]),
        (range(3), [1]),
        ([8, 15, 17, 18, 20], [17, 18]),
        ([4], [4]),
    ],
)
def test_a_quarter_of_the_layers_that_look_weighs_all(numbers, first):
    assert scout_layers(numbers, 2049, 512) == first
    assert scout_layers(numbers, 2048, 512) == [*numbers]


@pytest.mark.parametrize(
    ("archived", "most", "listed"),
    [
        (0, 512, 0),
        (2048, 512, 2048),
        (10_000, 512, 2048),
        (100_000, 512, 12_500),
        (10_000, 3000, 6000),
        (5000, 3000, 5000),
    ],
)
def test_what_a_shortlist_has(archived, most, listed):
    """An eighth of much, and twice what may come back."""
    assert shortlist_tokens(archived, most) == listed
    others = archived if listed == archived else listed + (archived - listed) // 16
    assert count_scored_tokens(archived, range(4), most) == archived + 3 * others
    assert count_scored_tokens(archived, [3], most) == archived


def test_what_is_read_is_what_is_counted(small, monkeypatch):
    sequence, caches = evicted(all_with(keys_at(200)))
    read = Counter()
    keys = Archive.read_keys

    def counted(archive, blocks, number):
        read[number] += sum(len(block.positions) for block in blocks)
        return keys(archive, blocks, number)

    archived = sum(len(block.positions) for block in sequence.archived)
    monkeypatch.setattr(Archive, "read_keys", counted)
    monkeypatch.setattr(Search, "best_positions", lambda search, blocks: [int(block.positions[-1]) for block in blocks])
    sequence.search_archive(caches, 1, 2 * BLOCK)
    assert archived > 2 * SMALL
    assert read.pop(SCOUT) == archived
    counted = count_scored_tokens(archived, range(LAYERS), 2 * BLOCK) - archived
    assert len(read) == LAYERS - 1
    assert all(abs(counted / 3 - tokens) < BLOCK for tokens in read.values())


@settings(max_examples=16, deadline=None, derandomize=True)
@given(numbers=st.lists(st.integers(0, 15), min_size=1, max_size=3, unique=True), inside=st.integers(0, BLOCK - 1))
def test_what_is_asked_for_is_found_as_by_all_layers(numbers, inside):
    places = [PREFIX + BLOCK * number + inside for number in numbers]
    sequence, caches = evicted(all_with(keys_at(*places)))
    whole = sequence.search_archive(caches, len(places), 6 * BLOCK)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(recall, "SHORTLIST", SMALL)
        found = sequence.search_archive(caches, len(places), 6 * BLOCK)
    assert blocks_of(found.blocks) == blocks_of(whole.blocks)
    assert {*numbers} <= {*blocks_of(found.blocks)}
    assert sorted(blocks_of(p.block for p in found.ranked)) == sorted(blocks_of(p.block for p in whole.ranked))


def test_all_layers_decide_among_what_scouts_choose(small):
    """The scout asks for one block and less for another, which is the one that all others ask for."""
    wanted, scouted = 402, 200
    both = keys_at(scouted) + 0.95 * keys_at(wanted)
    sequence, caches = evicted(all_with(keys_at(wanted)) | {SCOUT: both})
    ranked = sequence.search_archive(caches, 1, 2 * BLOCK).ranked
    assert blocks_of(piece.block for piece in ranked)[0] == (wanted - PREFIX) // BLOCK
    assert {piece.layer for piece in ranked[8:]} == {SCOUT}
    sequence, caches = evicted({SCOUT: both})
    ranked = sequence.search_archive(caches, 1, 2 * BLOCK).ranked
    assert blocks_of(piece.block for piece in ranked)[0] == (scouted - PREFIX) // BLOCK


def test_where_each_stands_for_itself_all_layers_weigh_all(small, monkeypatch):
    places = keys_at(200, 301, 402)
    sequence, caches = evicted(all_with(places))
    monkeypatch.setattr(recall, "SAMPLE_WEIGHT", 1)
    found = sequence.search_archive(caches, 3, 2 * BLOCK)
    monkeypatch.setattr(recall, "SHORTLIST", TOKENS)
    whole = sequence.search_archive(caches, 3, 2 * BLOCK)
    assert found.blocks == whole.blocks
    assert [piece.block for piece in found.ranked] == [piece.block for piece in whole.ranked]
    assert np.allclose([piece.score for piece in found.ranked], [piece.score for piece in whole.ranked], rtol=1e-5)


def test_some_of_the_rest_stand_for_all_of_it(monkeypatch):
    """To queries of zeros all tokens weigh the same."""
    sequence, caches = evicted(all_with(0 * keys_at(200)))
    monkeypatch.setattr(Search, "run", lambda search: search)
    search = sequence.search_archive(caches, 1, 2 * BLOCK)
    listed, some = search.blocks[2:9], search.blocks[9:11]
    found = np.stack([*search._log_weights(search.queries, listed, some)])
    live, beside, for_others = len(caches[0].positions), *(len(positions_of(each)) for each in (listed, some))
    assert found.shape == (LAYERS, 2, 1, 1, 9)
    assert np.allclose(found, -np.log(live + beside + 16 * for_others), rtol=1e-6)


def test_a_damaged_block_that_hides_others_is_dropped(monkeypatch):
    """Two tokens look at it, neither singles it out: it is on no shortlist, and nor is what one of them asks for."""
    monkeypatch.setattr(recall, "SHORTLIST", 2 * BLOCK)
    places = [200, 301, 402]
    (sequence, caches), (other, others) = (evicted(all_with(keys_at(*places))) for _ in range(2))
    number = (500 - PREFIX) // BLOCK
    damaged, gone = (one.archived[blocks_of(one.archived).index(number)] for one in (sequence, other))
    counts = [2 * shape.key_count(BLOCK) for shape in sequence.archive.shapes]
    begin = damaged.start + keys_start(BLOCK) + sum(counts[:SCOUT])
    os.pwrite(sequence.archive._file, b"\xff\x7b" * (counts[SCOUT] // 2), begin)
    gone.delete()
    found, wanted = sequence.search_archive(caches, 3, BLOCK), other.search_archive(others, 3, BLOCK)
    assert damaged.lost
    assert blocks_of(found.blocks) == blocks_of(wanted.blocks) != []
    assert [piece.score for piece in found.ranked] == [piece.score for piece in wanted.ranked]
