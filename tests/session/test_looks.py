"""Looks while an answer is made, against a look of one's own at a copy."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from cli.tools import facts
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step
from zoo import build

from mlx_tq import EvictConfig, KVConfig, compressed, make_prompt_cache
from mlx_tq.config import BLOCK
from mlx_tq.prompt_cache.passes import sequence_in, sequence_layers
from mlx_tq.prompt_cache.recall import LONGEST_QUESTION, Listener, looking, positions_of
from mlx_tq.session.looks import Looks
from mlx_tq.session.recall import Recalled, release

MOST, EVERY = 96, 8
EVICT = EvictConfig("recency:granularity=16:trigger=16", 128, recall=MOST, recall_every=EVERY)
CONFIG = KVConfig(key="q8", value="tq4", sinks=16, window=32, evict=EVICT)


def test_the_latest_queries_decide_what_is_back(exact):
    """As a copy of the cache would choose, beside what stays; all of it leaves again, and is archived once."""
    model, tokenizer = exact
    text, question = facts(40)
    caches = make_prompt_cache(model, CONFIG)
    looked, alone = 0, False
    with compressed(model):
        for ids in np.array_split(tokenizer.encode(text), 8):
            mx.eval(model(mx.array(ids)[None], cache=caches))
        sequence, layers = sequence_in(caches), sequence_layers(caches)
        asked = tokenizer.encode(question)
        named = sequence.archived[-1]
        sequence.recall(layers, [named])
        looks = Looks(caches, Recalled(named=(named,)))
        looks.begin()
        steps = generate_step(mx.array(asked), model, prompt_cache=caches, max_tokens=36)
        for _ in steps:
            if looks._since + 1 >= looks._next:  # the look comes with this token
                twin = copy.deepcopy(caches)
                sequence_in(twin)._listeners = sequence._listeners
                found = sequence_in(twin).look(sequence_layers(twin), EVERY, MOST, back=True)
                wanted = np.concatenate([extent.positions for extent in found.chosen])
            looks.token()
            if looks.count > looked:
                looked, archived = looks.count, len(positions_of(sequence.archived))
                assert sequence.recalled.tolist() == sorted({*wanted, *named.positions})
                alone |= not set(named.positions) <= set(wanted)
                assert set(wanted) <= set(layers[0].positions.tolist())
                assert 0 < len(wanted) <= MOST
    looks.end()
    assert looked
    assert alone, "a look would have taken it away"
    assert looks.positions
    brought = looks.brought()
    assert (brought.positions, brought.named) == (sorted({*looks.positions}), (named,))
    assert brought.archived == archived
    assert 0 < looks.seconds == brought.seconds
    release(caches)
    gone = set(range(layers[0].offset)) - set(layers[0].positions.tolist())
    assert sorted(p for extent in sequence.archived for p in extent.positions.tolist()) == sorted(gone)
    assert sequence.listener(0) is None


def test_what_is_quoted_comes_by_no_look(exact):
    """A block that lies in a quotation whole is there as text; one that only touches it is not."""
    model, tokenizer = exact
    text, question = facts(40)
    came = []
    for quoted in ((), [(0, 10**6)], None):
        caches = make_prompt_cache(model, CONFIG)
        spans = [(start + 1, start + BLOCK) for start in came[0][::BLOCK]] if quoted is None else quoted
        with compressed(model):
            for ids in np.array_split(tokenizer.encode(text), 8):
                mx.eval(model(mx.array(ids)[None], cache=caches))
            looks = Looks(caches, Recalled(), quoted=spans)
            looks.begin()
            asked = mx.array(tokenizer.encode(question))
            for _ in generate_step(asked, model, prompt_cache=caches, max_tokens=looks._next):
                looks.token()
        assert looks.count == 1
        came.append(looks.positions)
    assert came[0]
    assert came[1:] == [[], came[0]]


@pytest.mark.parametrize(("weighed", "shortlist"), [(6, 2048), (6, 64), (10**9, 2048)])
def test_when_a_look_comes_depends_on_counts_and_on_no_clock(exact, monkeypatch, weighed, shortlist):
    """The more a look reads, of what is archived and by layers, the later, but no sooner than is said; by no clock."""
    model, tokenizer = exact
    text, question = facts(40)
    monkeypatch.setattr("mlx_tq.session.looks._WEIGHED", weighed)
    monkeypatch.setattr("mlx_tq.prompt_cache.recall.SHORTLIST", shortlist)
    came = []
    for step in (0.0, 3600.0):
        clock = iter(np.arange(10_000) * step)
        monkeypatch.setattr("mlx_tq.session.looks.time.perf_counter", lambda clock=clock: next(clock))
        caches = make_prompt_cache(model, CONFIG)
        with compressed(model):
            for ids in np.array_split(tokenizer.encode(text), 8):
                mx.eval(model(mx.array(ids)[None], cache=caches))
            looks, at = Looks(caches, Recalled()), []
            looks.begin()
            archived, layers = len(positions_of(sequence_in(caches).archived)), len(sequence_layers(caches))
            for number, _ in enumerate(
                generate_step(mx.array(tokenizer.encode(question)), model, prompt_cache=caches, max_tokens=120)
            ):
                before = looks.count
                looks.token()
                at += [number + 1] * (looks.count - before)
        listed = min(archived, max(shortlist, 2 * MOST))
        assert (listed < archived) == (shortlist == 64)
        first = 1 if listed < archived else len(looking(layers))
        read = first * archived + (len(looking(layers)) - first) * (listed + (archived - listed) // 16)
        wait = int(read / layers / weighed)
        assert at[0] == max(EVERY, wait)
        assert (wait > EVERY) == (weighed == 6)
        came.append(at)
    assert came[0] == came[1]


def asked(exact, times=1):
    """Caches that lost most of a text and have read a question some times over, and the tokens of that."""
    model, tokenizer = exact
    text, question = facts(40)
    caches, ids = make_prompt_cache(model, CONFIG), tokenizer.encode(question) * times
    with compressed(model):
        for piece in np.array_split(tokenizer.encode(text), 8):
            mx.eval(model(mx.array(piece)[None], cache=caches))
        sequence_in(caches).listen(looking(len(sequence_layers(caches))), rounds=False)
        mx.eval(model(mx.array(ids)[None], cache=caches))
    return caches, ids


def weights_of(caches, count):
    """By layer the weights of all positions for the last `count` tokens, had none left: {number: [Hq, L, S]}."""
    twin = copy.deepcopy(caches)
    sequence, layers = sequence_in(twin), sequence_layers(twin)
    sequence.recall(layers, sequence.archived)
    positions, found = layers[0].positions, {}
    for number, listener in sequence_in(caches)._listeners.items():
        keys = np.array(layers[number].keys_and_values()[0].materialize().astype(mx.float32), np.float64)[0]
        queries = np.array(mx.concatenate(list(listener.heard), axis=2), np.float64)[0, :, -count:]
        logits = listener.scale * queries @ np.repeat(keys, len(queries) // len(keys), axis=0).swapaxes(1, 2)
        logits[:, positions > np.arange(layers[0].offset - count, layers[0].offset)[:, None]] = -np.inf
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        found[number] = weights / weights.sum(axis=-1, keepdims=True)
    assert np.array_equal(positions, np.arange(len(positions)))
    return found


@pytest.mark.parametrize("times", [1, 20])
def test_a_block_is_worth_what_a_token_makes_of_it_and_of_no_other(exact, times):
    """The scores of a look against float64 over the keys themselves, and the layer that made the most of each block.

    Also of a question whose first tokens are packed before its last ones are read.
    """
    caches, ids = asked(exact, times)
    assert (len(ids) > 2 * CONFIG.window + BLOCK) == (times > 1)
    sequence, weights = sequence_in(caches), weights_of(caches, len(ids))
    ranked = sequence.look(sequence_layers(caches), len(ids), MOST).ranked
    powers = {
        number: np.stack([(each[..., piece.extent.positions].max(axis=-1) ** 4).sum(axis=0) for piece in ranked], 1)
        for number, each in weights.items()
    }
    by_many = [[power**0.25 for power in token] for token in sum(powers.values())]
    worth = []
    for number, token in enumerate(by_many):
        squares = sum(each**2 for each in token)
        others = np.mean([other for at, other in enumerate(by_many) if at != number], axis=0)
        worth.append([max(0, each - mean) * each**2 / squares for each, mean in zip(token, others, strict=True)])
    assert np.allclose([piece.score for piece in ranked], np.max(worth, axis=0), rtol=1e-3)
    assert [piece.score for piece in ranked] == sorted((piece.score for piece in ranked), reverse=True)
    for place, piece in enumerate(ranked[:8]):
        assert piece.layer == max(powers, key=lambda number: powers[number][:, place].max())


@settings(max_examples=50, deadline=None, derandomize=True)
@given(passes=st.lists(st.sampled_from([1, 7, 64, 255, 256, 512]), min_size=1, max_size=300))
def test_what_was_heard_is_kept_while_a_question_may_need_it(passes):
    """The latest 256 tokens, and no pass that these do not need."""
    listener, ends = Listener(), np.cumsum(passes)
    for count, end in zip(passes, ends, strict=True):
        listener.hear(mx.arange(int(end) - count, int(end))[None, None, :, None], 1.0)
    kept = np.concatenate([np.array(each).ravel() for each in listener.heard])
    assert kept.tolist() == list(range(int(ends[-1]) - len(kept), int(ends[-1])))
    assert len(kept) >= min(LONGEST_QUESTION, ends[-1])
    assert len(kept) - listener.heard[0].shape[2] < LONGEST_QUESTION


def test_layers_that_share_keys_are_heard_once():
    """A token asks with the queries of the layer whose keys they are."""
    model = build("gemma4_text")
    caches = make_prompt_cache(model, CONFIG)
    sequence = sequence_in(caches)
    sequence.listen(range(len(sequence_layers(caches))), rounds=True)
    with compressed(model):
        for count in (9, 1):
            mx.eval(model(mx.arange(count)[None], cache=caches))
    heard = [listener.heard for listener in sequence._listeners.values()]
    assert model.args.num_kv_shared_layers == 2
    assert [[each.shape[2] for each in queries] for queries in heard] == [[9, 1]] * len(heard)


def test_the_layers_that_decided_the_question_look_while_it_is_answered(exact):
    """Those of its eight best blocks; the others' queries are not kept."""
    caches, ids = asked(exact)
    sequence, layers = sequence_in(caches), sequence_layers(caches)
    ranked = sequence.look(layers, len(ids), MOST).ranked
    Looks(caches, Recalled(ranked=tuple(ranked))).begin()
    heard = {number for number in range(len(layers)) if sequence.listener(number)}
    assert heard == {piece.layer for piece in ranked[:8]} < set(looking(len(layers)))
