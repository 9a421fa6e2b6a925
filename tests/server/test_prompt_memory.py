"""Prompts in memory: found by their longest prefix, counted by what they hold, removed by worth."""

import copy
import logging
from itertools import takewhile

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache, trim_prompt_cache
from prefix_cache.runs import digest
from zoo import build

from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.prompt_cache import compressed as api
from mlx_tq.prompt_cache.capacity import release_capacity
from mlx_tq.server.prompt_memory import PromptMemory

UNLIMITED = 2**60
CONFIG = KVConfig(key="q8", value="tq4", sinks=16, window=32)
PROMPT = np.random.default_rng(0).integers(5, 150, 3000).tolist()
LLAMA = build("llama")
QUICK = (("llama", 600), ("gemma3_text", 600), ("qwen3_next", 20))


def prefilled(ids, model=LLAMA, config=CONFIG, caches=None, step=500):
    caches = caches or (make_prompt_cache(model) if config is None else api.make_prompt_cache(model, config))
    with api.compressed_attention(model):
        for start in range(0, len(ids), step):
            model(mx.array([ids[start : start + step]]), cache=caches)
    mx.eval([cache.state for cache in caches])
    return caches


def plain(ids, trimmable=True):
    """Return a cache whose rows are the token ids."""
    rows = mx.array(ids, mx.float32).reshape(1, 1, -1, 1)
    if not trimmable:
        cache = ArraysCache(1)
        cache[0] = rows
        return [cache]
    cache = KVCache()
    cache.update_and_fetch(rows, rows)
    return [cache]


def rows_of(caches):
    (cache,) = caches
    rows = cache[0] if isinstance(cache, ArraysCache) else cache.keys[:, :, : cache.offset]
    return rows.reshape(-1).tolist()


IDS = st.lists(st.integers(0, 2), min_size=1, max_size=7)


@given(st.lists(st.tuples(IDS, st.booleans()), max_size=6), IDS, st.integers(0, 7))
@example([([0], False), ([0, 0], True), ([0, 0], False)], [0], 1)
def test_the_longest_prefix_is_found(stored, ids, most):
    memory, most = PromptMemory(UNLIMITED), min(most, len(ids))
    for prompt, trimmable in stored:
        memory.insert(prompt, plain(prompt, trimmable))
    lengths = [0]
    for prompt, trimmable in stored:
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, ids, strict=False)))
        if trimmable or len(prompt) <= min(common, most):
            lengths.append(min(common, most))
    caches, length = memory.find(ids, most)
    assert length == max(lengths)
    assert (caches is None) == (length == 0)
    if caches is not None:
        assert rows_of(caches) == ids[:length]


@pytest.mark.full
def test_shared_rows_count_once():
    memory, shared = PromptMemory(UNLIMITED), prefilled(PROMPT[:2900])
    memory.insert(PROMPT[:2900], shared)
    alone = memory.nbytes
    for fork in range(5):
        ids = [*PROMPT[:2900], *[5 + fork] * 100]
        caches, length = memory.find(ids, 2900)
        assert length == 2900
        memory.insert(ids, prefilled(ids[2900:], caches=caches))
    assert len(memory) == 5  # the first one has become a part of another
    assert memory.nbytes < 2 * alone
    memory.trim_to(0)
    assert (len(memory), memory.nbytes) == (0, 0)


def test_a_short_copy_of_a_long_prompt_does_not_keep_its_rows():
    memory, long = PromptMemory(UNLIMITED), prefilled(PROMPT)
    caches = copy.deepcopy(long)
    trim_prompt_cache(caches, 2700)
    memory.insert(PROMPT[:300], caches)
    fresh = PromptMemory(UNLIMITED)
    fresh.insert(PROMPT[:300], prefilled(PROMPT[:300]))
    assert memory.nbytes < 1.5 * fresh.nbytes


@pytest.mark.parametrize("count", [1, 20, 100])
def test_a_short_prompt_takes_no_more_than_its_rows(count):
    memory = PromptMemory(UNLIMITED)
    memory.insert(PROMPT[:count], prefilled(PROMPT[:count]))
    native = PromptMemory(UNLIMITED)
    native.insert(PROMPT[:count], prefilled(PROMPT[:count], config=None))
    assert native.nbytes == 2 * 2 * count * 2 * 64 * 4  # keys and values of two layers with two heads
    assert memory.nbytes <= 1.5 * native.nbytes + 100  # queries, until the scale of keys is known


@pytest.mark.parametrize(
    ("name", "count"),
    [
        pytest.param(name, count, marks=[] if (name, count) in QUICK else pytest.mark.full)
        for name in ("llama", "gemma3_text", "qwen3_next")
        for count in (20, 100, 600)
    ],
)
def test_what_follows_does_not_depend_on_room(name, count):
    """One token, a few, and many; rotating windows, too."""
    model = build(name)
    roomy = prefilled(PROMPT[:count], model, step=300)
    small = copy.deepcopy(roomy)
    release_capacity(small)
    assert sum(cache.nbytes for cache in small) <= sum(cache.nbytes for cache in roomy)
    start = count
    for following in (1, 5, 40, 1, 200, 1):
        outputs = []
        for caches in (roomy, small):
            with api.compressed_attention(model):
                outputs.append(model(mx.array([PROMPT[start : start + following]]), cache=caches))
        start += following
        assert mx.array_equal(*outputs)
    release_capacity(roomy)
    release_capacity(small)
    assert digest(roomy) == digest(small)


def test_side_requests_do_not_remove_a_long_prompt():
    long, side = prefilled(PROMPT[:1500]), prefilled(PROMPT[:33])
    memory = PromptMemory(UNLIMITED)
    memory.insert(PROMPT[:1500], copy.deepcopy(long))
    memory = PromptMemory(memory.nbytes * 3 // 2)
    memory.insert(PROMPT[:1500], long)
    for number in range(300):
        memory.insert([200 + number, *PROMPT[1:33]], copy.deepcopy(side))
    assert memory.find(PROMPT, 2000)[1] == 1500
    assert 1 < len(memory) < 300


def test_a_short_prompt_in_use_stays_longer_than_long_ones_that_are_not():
    """Caches with states, as of a system prompt with which all conversations begin."""
    memory, system = PromptMemory(330 * 4), [1] * 100
    memory.insert(system, plain([0], trimmable=False))
    for number in range(400):
        memory.insert([2, number, *[3] * 598], plain([0], trimmable=False))
        if number % 12 == 0:
            assert memory.find(system, 100)[1] == 100
    assert len(memory) == 330


def test_of_prompts_of_one_length_the_least_recently_used_leaves():
    memory = PromptMemory(UNLIMITED)
    for first in range(4):
        memory.insert([first, 7, 8], plain([first, 7, 8]))
    memory.find([0, 7, 8, 9], 3)
    memory.trim_to(memory.nbytes // 2)
    assert [memory.find([first, 7, 8], 3)[1] for first in range(4)] == [3, 0, 0, 3]


def test_what_eviction_took_is_not_found():
    """So a prefix from which nothing was evicted stays."""
    config = KVConfig(key="q8", sinks=16, window=32, evict=EvictConfig("knorm:trigger=32:granularity=1", 80, "off"))
    memory = PromptMemory(UNLIMITED)
    memory.insert(PROMPT[:70], prefilled(PROMPT[:70], config=config, step=64))
    memory.insert(PROMPT[:400], prefilled(PROMPT[:400], config=config, step=64))
    assert [memory.find(PROMPT[:count], count)[1] for count in (60, 300, 500)] == [60, 70, 400]
    memory = PromptMemory(UNLIMITED)
    memory.insert(PROMPT[:400], prefilled(PROMPT[:400], config=config, step=64))
    assert memory.find(PROMPT[:60], 60) == (None, 0)


def test_a_look_changes_nothing(caplog):
    memory = PromptMemory(UNLIMITED)
    for first in range(3):
        memory.insert([first, 7, 8], plain([first, 7, 8]))
    with caplog.at_level(logging.DEBUG, "mlx_tq.server.prompt_memory"):
        for _ in range(100):
            assert memory.find([0, 7, 9], 3, notes_use=False)[1] == 2
    assert not caplog.records
    memory.trim_to(memory.nbytes // 2)
    assert memory.find([0, 7, 8], 3)[1] == 0, "the oldest one has left"


def test_the_place_where_prompts_diverge_is_logged(caplog):
    memory = PromptMemory(UNLIMITED, lambda ids: " ".join(map(str, ids)))
    memory.insert(list(range(100)), plain(list(range(100))))
    with caplog.at_level(logging.DEBUG, "mlx_tq.server.prompt_memory"):
        memory.find([*range(50), 7, 7], 51)
        memory.find([*range(120)], 119)
    (message,) = [record.message for record in caplog.records]
    stored = " ".join(map(str, range(40, 60)))
    text = f"{stored.partition(' 50')[0]} 7 7"
    assert message == f"a prompt diverges from the closest stored one after 50 tokens: '{text}', not '{stored}'"


def test_a_prompt_keeps_the_states_of_those_it_extends():
    """And loses the earliest first where memory is short; its bytes are those of what is left."""
    memory, lengths = PromptMemory(UNLIMITED), (500, 1000, 1500)
    caches, model = None, build("qwen3_next")
    states = {}
    for start, stop in zip((0, *lengths), lengths, strict=False):
        caches = prefilled(PROMPT[start:stop], model, caches=caches)
        states[stop] = next(cache for cache in caches if isinstance(cache, ArraysCache))[1]
        memory.insert(PROMPT[:stop], copy.deepcopy(caches))
    assert len(memory) == 1
    for most, count in ((1600, 1500), (1499, 1000), (999, 500), (499, 0)):
        found, length = memory.find(PROMPT[:1600], most)
        assert memory.longest(PROMPT[:1600], most) == length == count
        if count:
            assert {cache.offset for cache in found if not isinstance(cache, ArraysCache)} == {count}
            assert mx.array_equal(next(cache for cache in found if isinstance(cache, ArraysCache))[1], states[count])
    alone = PromptMemory(UNLIMITED)
    alone.insert(PROMPT[:1500], caches)
    each = (memory.nbytes - alone.nbytes) // 2
    memory.trim_to(memory.nbytes - 1)
    assert (memory.nbytes, memory.longest(PROMPT, 1499), memory.longest(PROMPT, 999)) == (alone.nbytes + each, 1000, 0)
    memory.trim_to(alone.nbytes)
    assert (memory.nbytes, memory.longest(PROMPT, 1500), memory.longest(PROMPT, 1499)) == (alone.nbytes, 1500, 0)
    memory.trim_to(0)
    assert (memory.nbytes, len(memory)) == (0, 0)


def test_chunked_caches_that_dropped_rows_are_used_whole_or_not_at_all():
    """Llama 4 has chunks of 16 tokens here; a prompt of 12 has all of its rows."""
    memory, model = PromptMemory(UNLIMITED), build("llama4")
    memory.insert(PROMPT[:40], prefilled(PROMPT[:40], model))
    memory.insert(PROMPT[:100], prefilled(PROMPT[:100], model, step=10))
    assert (memory.longest(PROMPT, 120), memory.longest(PROMPT, 99), memory.longest(PROMPT, 39)) == (100, 40, 39)
    found, length = memory.find(PROMPT[:70], 70)
    follow, whole = PROMPT[length:70], prefilled(PROMPT[:length], model)
    with api.compressed_attention(model):
        logits = [model(mx.array([follow]), cache=caches) for caches in (found, whole)]
    assert length == 40
    assert mx.array_equal(*logits)
