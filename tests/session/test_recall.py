"""What a message asks for."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
from cli.tools import facts

from mlx_tq import EvictConfig, KVConfig, compressed, make_prompt_cache
from mlx_tq.prompt_cache.files import load_prompt_cache, save_prompt_cache
from mlx_tq.prompt_cache.passes import sequence_in, sequence_layers
from mlx_tq.prompt_cache.recall import LONGEST_QUESTION
from mlx_tq.session.recall import live_positions, ready_to_recall, recall, release

EVICT = EvictConfig("recency:granularity=16:trigger=16", 500, recall=96)
CONFIG = KVConfig(key="q8", value="tq4", sinks=16, window=32, evict=EVICT)


def test_the_end_of_a_long_message_asks(exact):
    """It finds what its end alone finds, and no more leaves for it, however long it is."""
    model, tokenizer = exact
    text, question = facts(80)
    short = tokenizer.encode(question)
    long = [*tokenizer.encode("The history of the city. ")] * 150 + short
    assert len(long) > 2 * LONGEST_QUESTION
    found = []
    for message in (long, long[-LONGEST_QUESTION:]):
        caches = make_prompt_cache(model, CONFIG)
        with compressed(model):
            for ids in np.array_split(tokenizer.encode(text), 8):
                mx.eval(model(mx.array(ids)[None], cache=caches))
        positions = recall(model, caches, message, 128, most=96).positions
        found.append((positions, sequence_in(caches).stats.tokens))
        release(caches)
    assert found[0] == found[1]
    assert found[0][0]


def test_the_first_round_does_not_wait_until_the_question_was_read(exact):
    """A policy's statistics get their window in the middle of the question: what leaves then was never looked for."""
    model, tokenizer = exact
    text, question = facts(40)
    ids, asked = tokenizer.encode(text), tokenizer.encode(question)
    warmup = len(ids) + len(asked) // 2
    policy = f"published:calibration=text:score_unrotated_dims=on:warmup={warmup}:trigger=16"
    caches = make_prompt_cache(model, replace(CONFIG, evict=EvictConfig(policy, 200, recall=96)))
    with compressed(model):
        for piece in np.array_split(ids, 8):
            mx.eval(model(mx.array(piece)[None], cache=caches))
        sequence = sequence_in(caches)
        assert not sequence.stats.rounds
        found = recall(model, caches, asked, 128)
        left = sequence.stats
        mx.eval(model(mx.array(asked)[None], cache=caches))
        mx.eval(model(mx.array([[0]]), cache=caches))
    assert found.positions
    assert sequence.stats == left
    assert all(calibrator.ready for calibrator in sequence.calibrators.values())


def test_of_a_loaded_conversation_the_round_is_held_before_the_question_too(exact, tmp_path):
    """As of the one that was saved: what leaves for the question is known before it is read."""
    model, tokenizer = exact
    text, _ = facts(40)
    config = replace(CONFIG, evict=EvictConfig("triattention:calibration=text:warmup=64:trigger=16", 200, recall=96))
    caches, path = make_prompt_cache(model, config), tmp_path / "a.safetensors"
    ids = tokenizer.encode(text)
    with compressed(model):
        for start in range(0, len(ids), 64):
            mx.eval(model(mx.array(ids[start : start + 64])[None], cache=caches))
    sequence_in(caches).before(sequence_layers(caches), 0)  # nothing more is due but for the question
    save_prompt_cache(path, caches, model=model, config=config)
    loaded = load_prompt_cache(path, model=model).caches
    held = []
    for each in (caches, loaded):
        before = sequence_in(each).stats.rounds
        ready_to_recall(each, 64)
        held.append((sequence_in(each).stats.rounds - before, live_positions(each, 0).tolist()))
    assert held[0][0] == 1
    assert held[0] == held[1]
