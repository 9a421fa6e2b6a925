"""A token waits for the GPU only where mlx-lm's own loop does: everything that can wait is counted.

The buffer protocol has no name to be counted by; so whatever uses it is: NumPy's functions, and, where this package or
mlx-lm call them, memoryview and its like.
"""

import builtins
import os
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from rescue.harness import Server

from mlx_tq import EvictConfig, KVConfig, Session, make_prompt_cache
from mlx_tq.cli.haystack import load_text
from mlx_tq.codec import codebook
from mlx_tq.config import BLOCK, PROFILES
from mlx_tq.policies import parse_policy
from mlx_tq.prompt_cache.compressed import compressed
from mlx_tq.prompt_cache.layer_group import layer_group_of
from mlx_tq.session.restore import RecallDuringDecode, RecallResult

READ, SKIPPED, COUNTED = 168, 2, 40  # tokens; those counted fill a block
PACKED = KVConfig(key="q8", value="tq4", sinks=8, window=8)
METHODS = ("item", "tolist", "__array__", "__bool__", "__int__", "__float__", "__index__", "__iter__", "__dlpack__")
METHODS += ("__repr__", "__format__")
NUMPY = ("array", "asarray", "asanyarray", "ascontiguousarray", "frombuffer", "from_dlpack", "copy", "stack")
FUNCTIONS = [(mx, name) for name in ("eval", "synchronize", "save", "save_safetensors")]
FUNCTIONS += [(np, name) for name in (*NUMPY, "concatenate")]
BUILTINS = ("memoryview", "bytes", "bytearray")


def holds_array(x):
    return isinstance(x, mx.array) or (isinstance(x, list | tuple) and any(map(holds_array, x)))


@contextmanager
def waits():
    """Calls meanwhile that make the host wait, by name."""
    found = Counter()

    def counted(name, function, *, always=False):
        def call(*arguments, **options):
            found[name] += always or holds_array(arguments)
            return function(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in METHODS:
            patch.setattr(mx.array, name, counted(name, getattr(mx.array, name)))
        for module, name in FUNCTIONS:
            patch.setattr(module, name, counted(name, getattr(module, name), always=module is mx))
        for name in BUILTINS:  # in the modules' own names: others compare types with these
            for module in [m for n, m in sys.modules.items() if n.partition(".")[0] in ("mlx_tq", "mlx_lm")]:
                patch.setattr(module, name, counted(name, getattr(builtins, name)), raising=False)
        yield found


def evicting(budget, policy="triattention"):
    evict = EvictConfig(parse_policy(policy, trigger=16, warmup=64, granularity=1), budget, "off")
    return KVConfig(key="q8", value="tq4", sinks=8, window=8, evict=evict)


def generated(exact, config):
    """What a generation waits for after its first tokens, its rounds then, and the positions that left."""
    model, tokenizer = exact
    ids = mx.array(tokenizer.encode(load_text()[:4000])[:READ])
    cache = make_prompt_cache(model, config)
    sequence = layer_group_of(cache)
    with compressed(model):
        steps = generate_step(ids, model, prompt_cache=cache, max_tokens=SKIPPED + COUNTED)
        for _ in range(SKIPPED):
            next(steps)
        before = sequence.stats.rounds if sequence else 0
        with waits() as found:
            assert len(list(steps)) == COUNTED
    rounds = sequence.stats.rounds - before if sequence else 0
    return found, rounds, sequence.evicted if sequence else []


@pytest.fixture(scope="module")
def plain(exact):
    """Of mlx-lm's own cache."""
    return generated(exact, PROFILES["off"])[0]


def test_a_wait_is_counted(monkeypatch):
    x = mx.arange(3)
    with waits() as found:
        _ = (x[0].item(), x.tolist(), bool(x[1] > 0), int(x[2]), float(x[2]), np.array(x), np.asarray(x), f"{x[0]}")
        _ = (np.stack([x, x]), np.concatenate([x]), np.frombuffer(x, np.int32), codebook.memoryview(x), repr(x))
        mx.eval(x + 1)
    names = {"item", "tolist", "__bool__", "__int__", "__float__", "array", "asarray", "eval", "stack", "concatenate"}
    assert set(found) >= names | {"frombuffer", "memoryview", "__format__", "__repr__"}
    with waits() as found:
        _ = (np.array([1]), np.stack([np.ones(2)] * 2), codebook.bytes(b"1"), isinstance(b"", bytes))
    assert not found.total(), "others are not"


def test_the_loop_of_mlx_lm_waits_once_a_token(plain):
    assert plain["item"] == COUNTED
    assert plain.total() <= COUNTED + 2


def of_checks(exact, checks=COUNTED // BLOCK):
    """When a block is packed each layer reads what the block before it found: computed 32 tokens ago."""
    return Counter({"__int__": checks * len(exact[0].layers)})


def test_a_compressed_cache_adds_none(exact, plain):
    assert generated(exact, PACKED)[0] == plain + of_checks(exact)


@pytest.mark.parametrize("policy", ["triattention", "triattention:warmup=1024", "recency"])
def test_eviction_adds_none_between_rounds(exact, plain, policy):
    """Under budget no round comes; also while it calibrates."""
    found, rounds, _ = generated(exact, evicting(10_000, policy))
    assert rounds == 0
    assert found == plain + of_checks(exact)


@pytest.mark.parametrize("policy", ["triattention", "recency"])
def test_a_round_waits_a_fixed_number_of_times(exact, plain, policy):
    found, rounds, gone = generated(exact, evicting(96, policy))
    more = found - plain - of_checks(exact)
    print(f"{rounds} rounds: {dict(more)}")
    assert len(gone)
    assert 0 < rounds < COUNTED / 10
    assert more.total() <= 6 * rounds * len(exact[0].layers)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """Of rescue, a real one."""
    server = Server(tmp_path_factory.mktemp("rescue") / "data", embedder="none")
    yield server
    server.stop()


class Conversed(NamedTuple):
    """What the second answer of a session waits for after its first tokens, and what happens then."""

    waits: Counter
    checks: int
    rounds: int
    evicted: int
    written: int  # spans


def conversed(exact, config, rescue="off"):
    model, tokenizer = exact
    ends = mx.zeros(model.args.vocab_size).at[mx.array(list(tokenizer.eos_token_ids))].add(mx.inf)
    mx.eval(ends)  # in this thread; the session computes in another
    with Session(
        model, tokenizer, config, rescue=rescue, sampler=lambda logprobs: mx.argmax(logprobs - ends, axis=-1)
    ) as session:
        cache, sequence = session.cache[0], layer_group_of(session.cache)

        def done():
            packed = 0 if config.is_off else cache.spec.packed_until(cache.offset) // BLOCK
            return packed, sequence.stats.rounds if sequence else 0

        list(session.respond(load_text()[:600], max_tokens=2))
        pieces = session.respond("And what did it say at its beginning?", max_tokens=SKIPPED + COUNTED)
        for _ in range(SKIPPED):
            next(pieces)
        before = done()
        with waits() as found:
            assert len(list(pieces)) == COUNTED
        blocks, rounds = (now - then for now, then in zip(done(), before, strict=True))
        checks = blocks + (not config.is_off)  # the last at the end of the answer
        if rescue != "off":
            assert session.client.flush(30)
        written = session.client.stats.written if session.client else 0
        return Conversed(found, checks, rounds, session.stats.evicted, written)


def test_to_listen_for_looks_waits_for_nothing(exact):
    """With recall on and nothing archived yet, the queries of every token are kept for a look."""
    plain = conversed(exact, PROFILES["off"]).waits
    config = evicting(10_000)
    found = conversed(exact, replace(config, evict=replace(config.evict, recall="auto")))
    assert found.waits == plain + of_checks(exact, found.checks)


def test_no_token_waits_for_the_archives_thread(exact, monkeypatch):
    """The disk takes nothing until the last token is there; looks meanwhile bring back what waits for it."""
    model, tokenizer = exact
    config = evicting(96, "recency")
    cache = make_prompt_cache(model, replace(config, evict=replace(config.evict, recall="auto", recall_every=BLOCK)))
    sequence, write = layer_group_of(cache), os.pwrite
    done, in_time = threading.Event(), []

    def late(*arguments):
        in_time.append(done.wait(20))
        return write(*arguments)

    monkeypatch.setattr(os, "pwrite", late)
    ids = mx.array(tokenizer.encode(load_text()[:4000])[:READ])
    with compressed(model):
        looks = RecallDuringDecode(cache, RecallResult())
        looks.start()
        for _ in generate_step(ids, model, prompt_cache=cache, max_tokens=COUNTED):
            looks.count_token()
    left = sequence.archived
    assert sequence.stats.rounds
    assert looks.positions
    assert all(block.pending for block in left), "nothing is written yet"
    done.set()
    sequence.archive.settle()
    assert in_time == [True] * len(left)
    assert not any(block.pending for block in left)
    assert all(map(sequence.archive.read, left))


def test_a_session_with_rescue_waits_only_in_rounds(exact, service):
    """The service is asked before the answer; what leaves is written to it meanwhile, and that waits for no array."""
    plain = conversed(exact, PROFILES["off"]).waits  # of a session on mlx-lm's own cache
    assert plain["item"] == COUNTED
    assert plain.total() <= COUNTED + 2
    found = conversed(exact, evicting(10_000), service.url)
    assert found.rounds == 0
    assert found.waits == plain + of_checks(exact, found.checks)
    found = conversed(exact, evicting(96, "recency"), service.url)
    more = found.waits - plain - of_checks(exact, found.checks)
    print(f"{found.rounds} rounds: {dict(more)}")
    assert found.evicted
    assert found.written
    assert 0 < found.rounds < COUNTED / 10
    assert more.total() <= 6 * found.rounds * len(exact[0].layers)
