"""All layers of a sequence lose the same tokens; copies, files and batches go on as if nothing had happened."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as native

from mlx_tq.config import Budget
from mlx_tq.errors import CacheFormatError
from mlx_tq.policies.selection import PositionRange
from mlx_tq.prompt_cache.cache_file import load_prompt_cache, save_prompt_cache
from mlx_tq.prompt_cache.compressed import compressed_attention, plan_caches
from mlx_tq.prompt_cache.layer_group import begin_pass, layer_group_of
from prompt_cache.driving import MODEL, POLICIES, TOKENS, config, extracted, fresh, live, merged, read, rounds

TOGETHER = r"All layers evict together: copy, keep and drop a prompt cache as a whole\.$"


@pytest.fixture(autouse=True, scope="module")
def _door():
    with compressed_attention(MODEL):
        yield


def through_mlx_lm_file(caches, folder):
    native.save_prompt_cache(str(folder / "mlx_lm.safetensors"), caches)
    return native.load_prompt_cache(str(folder / "mlx_lm.safetensors"))


def through_state(caches):
    return [type(cache).from_state(cache.state) for cache in caches]


def through_file(caches, folder):
    save_prompt_cache(folder / "x.safetensors", caches, model=MODEL, config=config())
    return load_prompt_cache(folder / "x.safetensors", model=MODEL).caches


COPIES = {
    "deepcopy": lambda caches, _: copy.deepcopy(caches),
    "layer by layer": lambda caches, _: [copy.deepcopy(cache) for cache in caches],
    "states": lambda caches, _: through_state(caches),
    "file": through_file,
    "file of mlx-lm": through_mlx_lm_file,
    "file of a file": lambda caches, folder: through_mlx_lm_file(through_file(caches, folder), folder),
    "batch": lambda caches, _: extracted(merged(caches), 0),
}


BEFORE, AFTER = 40, 125  # the first round


@pytest.mark.parametrize(
    ("policy", "length"),
    [
        pytest.param(POLICIES[0], AFTER, marks=pytest.mark.full),
        (POLICIES[1], BEFORE),
        pytest.param(POLICIES[0], BEFORE, marks=pytest.mark.full),
        pytest.param(POLICIES[1], AFTER, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("name", COPIES)
def test_copies_go_their_own_ways(name, length, policy, tmp_path):
    """Each evicts on as the original does, also where it calibrates; neither notices another, whatever that reads."""
    caches, alone = fresh(policy), fresh(policy)
    for each in (caches, alone):
        read(each, 0, length)
    before, held = live(caches), rounds(caches)
    read(COPIES[name](caches, tmp_path), length + 30, length + 150)
    twins = COPIES[name](caches, tmp_path)
    result = read(twins, length, length + 120)
    assert (live(caches), rounds(caches)) == (before, held)
    assert mx.array_equal(result, read(caches, length, length + 120))
    read(alone, length, length + 120)
    assert live(twins) == live(caches) == live(alone)
    assert rounds(twins) == rounds(caches) > held
    assert all(cache.group is layer_group_of(twins) for cache in twins)


@pytest.mark.parametrize("policy", [POLICIES[0], pytest.param(POLICIES[1], marks=pytest.mark.full)])
def test_rows_of_a_batch_evict_as_if_alone(policy):
    """Merged, filtered, joined by others and taken out again."""
    alone = [fresh(policy) for _ in range(3)]
    for shift, caches in zip((0, 30, 100), alone, strict=True):
        for start in range(0, 60 + shift // 2, 10):
            mx.eval(MODEL(mx.array([TOKENS[shift:][start : start + 10]]), cache=caches))
    batch, last = merged(*alone[:2]), merged(alone[2])
    for layer, other in zip(batch, last, strict=True):
        layer.filter([1, 0])
        layer.extend(other)
    order = [1, 0, 2]
    for token in TOKENS[:70]:
        step = mx.array([[token], [(token + 1) % 160], [(token + 2) % 160]])
        together = MODEL(step, cache=batch)
        single = mx.concatenate([MODEL(step[i : i + 1], cache=alone[row]) for i, row in enumerate(order)])
        mx.eval(together, single)
        assert mx.allclose(together, single, atol=2e-3)
    for place, row in enumerate(order):
        own = [layer.rows[place] for layer in batch]
        assert live(own) == live(alone[row])
        assert rounds(own) == rounds(alone[row]) > 0
    out = extracted(batch, 1)
    read(out, 0, 40)
    assert rounds(out) > rounds([layer.rows[1] for layer in batch])


def test_a_padded_batch_calibrates_each_row_on_its_own_tokens():
    prompts, policy = [TOKENS[:110], TOKENS[30:100]], POLICIES[1]
    batch, alone = merged(fresh(policy), fresh(policy)), [fresh(policy) for _ in prompts]
    for layer in batch:
        layer.prepare(lengths=[110, 70], right_padding=[0, 40])
    padded = mx.array([prompts[0], prompts[1] + [0] * 40])
    for start in range(0, 110, 55):
        mx.eval(MODEL(padded[:, start : start + 55], cache=batch))
    for layer in batch:
        layer.finalize()
    for prompt, caches in zip(prompts, alone, strict=True):
        for start in range(0, len(prompt), 55):
            mx.eval(MODEL(mx.array([prompt[start : start + 55]]), cache=caches))
    for token in TOKENS[:12]:
        mx.eval(MODEL(mx.array([[token], [token]]), cache=batch), *(MODEL(mx.array([[token]]), cache=c) for c in alone))
    for place, caches in enumerate(alone):
        assert live([layer.rows[place] for layer in batch]) == live(caches)
        assert rounds(caches) > 0


# Layers that do not belong together.


def test_a_missing_layer_is_refused():
    caches = fresh()
    read(caches, 0, 40)
    with pytest.raises(CacheFormatError, match=f"1 of the 2 caches of a sequence are left. {TOGETHER}"):
        MODEL(mx.array([[1]]), cache=caches[:1])
    assert caches[0].offset == 40
    assert layer_group_of(caches[::-1]) is layer_group_of(caches)  # their order does not matter
    keeps = fresh(policy=None)
    assert (layer_group_of(keeps), begin_pass(keeps, 5)) == (None, False)


@pytest.mark.parametrize("other", ["longer", "of another text", "twice the same", "of another plan"])
def test_layers_of_two_sequences_are_refused(other):
    first, second = fresh(), fresh(budget=70) if other == "of another plan" else fresh()
    read(first, 0, 130)
    if other == "longer":
        read(second, 0, 160)
    else:  # as many rounds, as many tokens, other positions
        read(second, 0, 130, row=[170])
    pair = [first[0].fork(), first[0].fork()] if other == "twice the same" else [first[0], second[1]]
    with pytest.raises(CacheFormatError, match=f"belong to different sequences. {TOGETHER}"):
        MODEL(mx.array([[1]]), cache=pair)


def test_an_interrupted_pass_is_refused_with_its_remedy():
    caches, never = fresh(), fresh()
    for each in (caches, never):
        read(each, 0, 90)
    second = MODEL.layers[1].self_attn

    def fail(*args, **kwargs):
        raise RuntimeError("interrupted")

    MODEL.layers[1].self_attn = fail
    try:
        with pytest.raises(RuntimeError, match="interrupted"):
            read(caches, 90, 95)
    finally:
        MODEL.layers[1].self_attn = second
    assert [cache.offset for cache in caches] == [95, 90]
    with pytest.raises(CacheFormatError, match=r"\[90, 95\] tokens: a pass was interrupted. Trim all to the least"):
        read(caches, 90, 95)
    for cache in caches:
        cache.trim(cache.offset - 90)
    assert mx.array_equal(read(caches, 90, 190), read(never, 90, 190))
    assert live(caches) == live(never)


# Passes that nobody announced.


@pytest.mark.parametrize("of", ["fresh", "after a pass", "copied", "loaded"])
def test_a_pass_around_the_door_is_refused(of):
    caches = fresh()
    if of != "fresh":
        read(caches, 0, 130)
    if of == "copied":
        caches = [cache.fork() for cache in caches]
    if of == "loaded":
        caches = through_state(caches)
    before = caches[0].offset
    with pytest.raises(CacheFormatError, match="did not announce itself, so no eviction round could be held before it"):
        caches[0].append(*(mx.zeros((1, 2, 1, 64)) for _ in range(2)))
    assert caches[0].offset == before
    read(caches, before, before + 20)  # through it, all is well


def test_a_trim_takes_the_announcement_back():
    caches = fresh()
    read(caches, 0, 50)
    caches[0].trim(10)
    with pytest.raises(CacheFormatError, match="did not announce itself"):
        caches[0].append(*(mx.zeros((1, 2, 3, 64)) for _ in range(2)))


def test_a_saved_part_waits_for_a_pass():
    """It goes on being copied, trimmed and saved meanwhile, and asks for nothing."""
    caches = fresh(POLICIES[1])
    read(caches, 0, 125)
    loaded = through_state(caches)
    assert all(cache.evicts and cache.group is None for cache in loaded)
    again = [cache.fork() for cache in loaded]
    loaded[0].trim(3)
    assert mx.array_equal(read(again, 125, 130), read(caches, 125, 130))
    # A file keeps no RoPE: the first pass tells it, so a calibrated round that is due then waits for the second.
    loaded, held = through_state(caches), rounds(caches)
    for each in (caches, loaded):
        read(each, 130, 131)
    assert (rounds(caches), rounds(loaded)) == (held + 1, held)
    read(loaded, 131, 132)
    assert rounds(loaded) == held + 1


# What left, and what may not.


def test_evicted_and_live_positions_are_all_positions():
    """Of a sequence, of its copies, and of one from a file; a reader sees from the object whether anything changed."""
    caches = fresh()
    read(caches, 0, 160)
    before = layer_group_of(caches).evicted
    others = [through_state(caches), copy.deepcopy(caches), [c.fork() for c in caches], extracted(merged(caches), 0)]
    for each in (caches, *others):
        assert np.array_equal(layer_group_of(each).evicted, before)
        read(each, 160, 240)
        evicted = layer_group_of(each).evicted
        assert (evicted is before, evicted.dtype) == (False, np.int64)
        assert len(evicted) == layer_group_of(each).stats.tokens
        assert sorted(evicted.tolist() + live(each)) == list(range(240))
    read(caches, 240, 241)
    held = layer_group_of(caches).evicted
    read(caches, 241, 242)
    assert layer_group_of(caches).evicted is held


def test_held_positions_go_with_copies_and_rows():
    caches, span = fresh(), PositionRange(30, 50)
    read(caches, 0, 60)
    layer_group_of(caches).pinned = span
    row = merged(caches)
    layer_group_of(caches).pinned = None
    for each in (caches, row):
        read(each, 60, 300)
    kept = live([layer.rows[0] for layer in row])
    assert set(range(*span)) <= set(kept)
    assert not set(range(*span)) <= set(live(caches))
    assert len(kept) <= 60 + 8 + 20 + len(range(*span))


def test_another_plan_from_now_on():
    caches = fresh(budget=300)
    read(caches, 0, 130)
    twins = copy.deepcopy(caches)
    assert len({id(cache.group) for cache in (*caches, *twins)}) == 2, "a list is copied with its group"
    layer_group_of(twins).plan = plan_caches(MODEL, config(budget=50)).eviction
    assert layer_group_of(twins).plan.budget == Budget(tokens=50)
    for each in (caches, twins):
        read(each, 130, 131)
    assert (rounds(caches), rounds(twins)) == (0, 1)
    assert len(live(twins)) == 50 + 1
