"""Random grammars get a result in time, and the process that compiles them survives."""

import asyncio
import random
import time
from collections import Counter

import mlx.core as mx
import pytest

from mlx_tq.grammar.constraint import Grammars
from mlx_tq.grammar.grammar_source import GrammarError
from mlx_tq.grammar.sandbox import CompileLimits
from mlx_tq.models import load

from .random_grammars import random_source

AT_ONCE = 4
MASKS = 24
LATE_S = 10  # on a busy machine, beyond the limit


def follow(constraint, eos_ids, rng, width=4140):
    """Generate a random answer; return how it ended."""
    tokens, logits = [5], mx.random.normal((1, width), key=mx.random.key(rng.randrange(2**32)))
    for _ in range(MASKS):
        likely = constraint(mx.array(tokens), logits)
        if constraint.error is not None:
            return "too complex"
        tokens.append(mx.argmax(likely).item())
        if tokens[-1] in eos_ids:
            break
    return "followed"


async def outcome(grammars, eos_ids, seed):
    """Return the outcome of a seed's grammar, and its seconds."""
    rng, started = random.Random(seed), time.monotonic()
    try:
        grammar = await grammars.compile(random_source(rng))
    except GrammarError as error:
        result = "limit" if type(error) is not GrammarError else "invalid"
    else:
        result = follow(grammars.constraint(grammar), eos_ids, rng)
    return result, time.monotonic() - started


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.full)])
def test_every_grammar_gets_a_result_in_time(count):
    tokenizer = load()[1]
    grammars, outcomes, seconds = Grammars(tokenizer), Counter(), []

    async def work(seeds):
        for seed in seeds:
            result, duration = await outcome(grammars, tokenizer.eos_token_ids, seed)
            outcomes[result] += 1
            seconds.append(duration)

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
