"""A token waits for the GPU only where mlx-lm's own loop does: everything that can wait is counted.

What is not called by its name, such as the buffer protocol behind `np.array`, is counted where this package calls it.
"""

from collections import Counter
from contextlib import contextmanager

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step

from mlx_tq import EvictConfig, KVConfig, Session, attention, make_prompt_cache
from mlx_tq.cache.factory import compressed_caches
from mlx_tq.config import BLOCK, PROFILES
from mlx_tq.haystack import load_text

READ, SKIPPED, COUNTED = 200, 2, 70  # tokens; those counted fill two blocks
PACKED = KVConfig(key="q8", value="tq4", prefix=8, window=8)
METHODS = ("item", "tolist", "__array__", "__bool__", "__int__", "__float__", "__index__", "__iter__", "__dlpack__")
FUNCTIONS = ((mx, "eval"), (mx, "synchronize"), (np, "array"), (np, "asarray"))


@contextmanager
def waits():
    """Calls meanwhile that make the host wait, by name."""
    found = Counter()

    def counted(name, function, about):
        def call(*arguments, **options):
            found[name] += about(arguments)
            return function(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in METHODS:
            patch.setattr(mx.array, name, counted(name, getattr(mx.array, name), lambda _: 1))
        for module, name in FUNCTIONS:
            patch.setattr(
                module,
                name,
                counted(name, getattr(module, name), lambda a, m=module: m is mx or isinstance(a[0], mx.array)),
            )
        yield found


def evicting(budget, policy="triattention"):
    warmup = {"warmup": 64} if policy == "triattention" else {}
    return KVConfig(
        key="q8", value="tq4", prefix=8, window=8, evict=EvictConfig(policy=policy, budget=budget, trigger=16, **warmup)
    )


def generated(embedded, config):
    """What a generation waits for after its first tokens, its rounds then, and the positions that its callback got."""
    model, tokenizer = embedded
    ids = mx.array(tokenizer.encode(load_text()[:4000])[:READ])
    cache, gone = make_prompt_cache(model, config), []
    evicts = [c for c in compressed_caches(cache) if hasattr(c, "subscribe")]
    if evicts:
        evicts[0].subscribe(gone.append)
    with attention(model):
        steps = generate_step(ids, model, prompt_cache=cache, max_tokens=SKIPPED + COUNTED)
        for _ in range(SKIPPED):
            next(steps)
        before = evicts[0].eviction.rounds if evicts else 0
        with waits() as found:
            assert len(list(steps)) == COUNTED
    rounds = evicts[0].eviction.rounds - before if evicts else 0
    return found, rounds, gone


@pytest.fixture(scope="module")
def plain(embedded):
    """Of mlx-lm's own cache."""
    return generated(embedded, PROFILES["off"])[0]


def test_a_wait_is_counted():
    x = mx.arange(3)
    with waits() as found:
        _ = (x[0].item(), x.tolist(), bool(x[1] > 0), int(x[2]), float(x[2]), np.array(x), np.asarray(x))
        mx.eval(x + 1)
    assert set(found) >= {"item", "tolist", "__bool__", "__int__", "__float__", "array", "asarray", "eval"}


def test_the_loop_of_mlx_lm_waits_once_a_token(plain):
    assert plain["item"] == COUNTED
    assert plain.total() <= COUNTED + 2


def of_blocks(embedded):
    """When a block is packed each layer reads what the block before it found: computed 32 tokens ago."""
    return Counter({"array": COUNTED // BLOCK * len(embedded[0].layers)})


def test_a_compressed_cache_adds_none(embedded, plain):
    assert generated(embedded, PACKED)[0] == plain + of_blocks(embedded)


@pytest.mark.parametrize("policy", ["triattention", "recency"])
def test_eviction_adds_none_between_rounds(embedded, plain, policy):
    """With a callback, as rescue has; under budget no round comes."""
    found, rounds, _ = generated(embedded, evicting(10_000, policy))
    assert rounds == 0
    assert found == plain + of_blocks(embedded)


@pytest.mark.parametrize("policy", ["triattention", "recency"])
def test_a_round_waits_a_fixed_number_of_times(embedded, plain, policy):
    found, rounds, gone = generated(embedded, evicting(96, policy))
    more = found - plain - of_blocks(embedded)
    print(f"{rounds} rounds: {dict(more)}")
    assert gone
    assert 0 < rounds < COUNTED / 10
    assert more.total() <= 6 * rounds * len(embedded[0].layers)


@pytest.mark.parametrize("config", [PROFILES["off"], evicting(10_000)], ids=["off", "evicting"])
def test_a_session_adds_none(embedded, config):
    with Session(*embedded, config, max_tokens=40, warn=lambda message: None) as session:
        pieces = session.respond(load_text()[:1500] + " Tell me all of it again.")
        next(pieces)
        before = len(session.ids)
        with waits() as found:
            list(pieces)
        tokens = len(session.ids) - before
    print(f"{tokens} tokens: {dict(found)}")
    assert found["item"] <= tokens + 2
    assert found.total() <= 2 * tokens + 4
