"""Looks while an answer is made, against a look of one's own at a copy."""

import copy

import mlx.core as mx
import numpy as np
from commands.tools import facts
from mlx_lm.generate import generate_step

from mlx_tq import EvictConfig, KVConfig, compressed, make_prompt_cache
from mlx_tq.conversation.looks import Looks
from mlx_tq.conversation.recall import Recalled, release
from mlx_tq.sequence.passes import sequence_in, sequence_layers
from mlx_tq.sequence.recall import looking

MOST, EVERY = 96, 8
EVICT = EvictConfig("recency:granularity=16:trigger=16", 128, recall=MOST)
CONFIG = KVConfig(key="q8", value="tq4", prefix=16, window=32, evict=EVICT)


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
        looks = Looks(caches, Recalled(named=(named,)), every=EVERY)
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
                looked = looks.count
                assert sequence.recalled.tolist() == sorted({*wanted, *named.positions})
                alone |= not set(named.positions) <= set(wanted)
                assert set(wanted) <= set(layers[0].positions.tolist())
                assert 0 < len(wanted) <= MOST
    looks.end()
    assert looked
    assert alone, "a look would have taken it away"
    assert looks.positions
    release(caches)
    gone = set(range(layers[0].offset)) - set(layers[0].positions.tolist())
    assert sorted(p for extent in sequence.archived for p in extent.positions.tolist()) == sorted(gone)
    assert sequence.listener(0) is None


def test_the_layers_that_decided_the_question_look_while_it_is_answered(exact):
    """Each block's layer is the one that, looking alone, gives it its score; the others' queries are not kept."""
    model, tokenizer = exact
    text, question = facts(40)
    caches = make_prompt_cache(model, CONFIG)
    with compressed(model):
        for ids in np.array_split(tokenizer.encode(text), 8):
            mx.eval(model(mx.array(ids)[None], cache=caches))
        sequence, layers = sequence_in(caches), sequence_layers(caches)
        sequence.listen(looking(len(layers)), rounds=False)
        ids = tokenizer.encode(question)
        mx.eval(model(mx.array(ids)[None], cache=caches))
    listeners = sequence._listeners
    ranked, alone = sequence.look(layers, len(ids), MOST).ranked, {}
    for number, listener in listeners.items():
        sequence._listeners = {number: listener}
        alone[number] = {piece.extent: piece.score for piece in sequence.look(layers, len(ids), MOST).ranked}
    for piece in ranked:
        assert piece.score == max(scores[piece.extent] for scores in alone.values())
        assert piece.score == alone[piece.layer][piece.extent]
    Looks(caches, Recalled(ranked=tuple(ranked))).begin()
    heard = {number for number in range(len(layers)) if sequence.listener(number)}
    assert heard == {piece.layer for piece in ranked[:8]} < set(looking(len(layers)))
