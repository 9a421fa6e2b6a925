"""What a message asks for."""

import mlx.core as mx
import numpy as np
from commands.tools import facts

from mlx_tq import EvictConfig, KVConfig, compressed, make_prompt_cache
from mlx_tq.conversation.recall import recall, release
from mlx_tq.sequence.passes import sequence_in
from mlx_tq.sequence.recall import LONGEST_QUESTION

EVICT = EvictConfig("recency:granularity=16:trigger=16", 500, recall=96)
CONFIG = KVConfig(key="q8", value="tq4", prefix=16, window=32, evict=EVICT)


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
