"""Whatever a client sends as a grammar, it is answered in time, and the process that serves goes on."""

import asyncio
import random
import time
from collections import Counter

import mlx.core as mx
import pytest

from mlx_tq.cli.grammar import Grammars
from mlx_tq.cli.grammar_forkserver import CompileLimits
from mlx_tq.cli.grammar_source import GrammarError
from mlx_tq.models import load

from .random_grammars import random_source

AT_ONCE = 4
MASKS = 24
LATE_S = 10  # on a busy machine, beyond the limit


def follow(constraint, ends, rng, width=4140):
    """Let a random answer follow the grammar; returns how it ended."""
    tokens, logits = [5], mx.random.normal((1, width), key=mx.random.key(rng.randrange(2**32)))
    for _ in range(MASKS):
        likely = constraint(mx.array(tokens), logits)
        if constraint.error is not None:
            return "too complex"
        tokens.append(mx.argmax(likely).item())
        if tokens[-1] in ends:
            break
    return "followed"


async def outcome(grammars, ends, seed):
    """What became of the grammar of a seed, and how long it took."""
    rng, began = random.Random(seed), time.monotonic()
    try:
        grammar = await grammars.compile(random_source(rng))
    except GrammarError as error:
        ended = "limit" if type(error) is not GrammarError else "invalid"
    else:
        ended = follow(grammars.constraint(grammar), ends, rng)
    return ended, time.monotonic() - began


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.full)])
def test_every_grammar_is_answered_in_time(count):
    tokenizer = load()[1]
    grammars, outcomes, seconds = Grammars(tokenizer), Counter(), []

    async def work(seeds):
        for seed in seeds:
            ended, took = await outcome(grammars, tokenizer.eos_token_ids, seed)
            outcomes[ended] += 1
            seconds.append(took)

    async def main():
        await asyncio.gather(*(work(range(start, count, AT_ONCE)) for start in range(AT_ONCE)))

    try:
        asyncio.run(main())
    finally:
        grammars.close()
    print(outcomes, f"longest {max(seconds):.1f} s")
    assert outcomes.total() == count
    assert outcomes["followed"] > count / 10
    assert outcomes["invalid"] > count / 10
    # A valid grammar is compiled twice, each time by one process or thread of AT_ONCE.
    assert max(seconds) < (1 + AT_ONCE) * CompileLimits().seconds + LATE_S
