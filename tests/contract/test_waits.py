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
from mlx_tq.cli.inputs import load_text
from mlx_tq.codec import codebook
from mlx_tq.config import BLOCK, PROFILES
from mlx_tq.kernels import backend
from mlx_tq.policies import parse_policy
from mlx_tq.prompt_cache.compressed import compressed_attention
from mlx_tq.prompt_cache.layer_group import layer_group_of
from mlx_tq.session.restore import RecallDuringDecode, RecallResult

PROMPT, SKIPPED, COUNTED = 168, 2, 40  # tokens; those counted fill a block
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
def counted_waits():
    """Count the calls that make the host wait, by name."""
    waits = Counter()

    def counted(name, function, *, always=False):
        def call(*arguments, **options):
            waits[name] += always or holds_array(arguments)
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
        yield waits


@pytest.fixture(autouse=True, scope="module")
def _reference():
    """The kernels of a CPU wait for their inputs in every layer; what a GPU does is what mlx operations do."""
    with backend.using("reference"):
        yield


class Decoded(NamedTuple):
    """What the tokens after the first ones waited for, and what happened meanwhile."""

    waits: Counter
    blocks: int  # packed
    rounds: int
    evicted: int


def decode(steps, caches):
    sequence, layer = layer_group_of(caches), caches[0]

    def progress():
        packed = layer.spec.packed_until(layer.offset) // BLOCK if hasattr(layer, "spec") else 0
        return np.array([packed, *((sequence.stats.rounds, sequence.stats.tokens) if sequence else (0, 0))])

    for _ in range(SKIPPED):
        next(steps)
    before = progress()
    with counted_waits() as waits:
        assert len(list(steps)) == COUNTED
    return Decoded(waits, *(progress() - before).tolist())


def evicting(budget, policy="triattention", **changes):
    evict = EvictConfig(
        parse_policy(policy, trigger=16, warmup=64, granularity=1), budget, **{"recall": "off", **changes}
    )
    return replace(PACKED, evict=evict)


def generate(exact, config):
    model, tokenizer = exact
    ids = mx.array(tokenizer.encode(load_text()[:4000])[:PROMPT])
    cache = make_prompt_cache(model, config)
    with compressed_attention(model):
        return decode(generate_step(ids, model, prompt_cache=cache, max_tokens=SKIPPED + COUNTED), cache)


def checks(exact, blocks=COUNTED // BLOCK):
    """When a block is packed each layer reads what the block before it found: computed 32 tokens ago."""
    return Counter({"__int__": blocks * len(exact[0].layers)})


def check_rounds(exact, decoded, plain, blocks):
    """A round waits a fixed number of times."""
    more = decoded.waits - plain - checks(exact, blocks)
    print(f"{decoded.rounds} rounds: {dict(more)}")
    assert decoded.evicted
    assert 0 < decoded.rounds < COUNTED / 10
    assert more.total() <= 6 * decoded.rounds * len(exact[0].layers)


@pytest.fixture(scope="module")
def plain(exact):
    return generate(exact, PROFILES["off"]).waits


def test_a_wait_is_counted():
    x = mx.arange(3)
    with counted_waits() as waits:
        _ = (x[0].item(), x.tolist(), bool(x[1] > 0), int(x[2]), float(x[2]), np.array(x), np.asarray(x), f"{x[0]}")
        _ = (np.stack([x, x]), np.concatenate([x]), np.frombuffer(x, np.int32), codebook.memoryview(x), repr(x))
        mx.eval(x + 1)
    names = {"item", "tolist", "__bool__", "__int__", "__float__", "array", "asarray", "eval", "stack", "concatenate"}
    assert set(waits) >= names | {"frombuffer", "memoryview", "__format__", "__repr__"}
    with counted_waits() as waits:
        _ = (np.array([1]), np.stack([np.ones(2)] * 2), codebook.bytes(b"1"), isinstance(b"", bytes))
    assert not waits.total(), "others are not"


def test_the_loop_of_mlx_lm_waits_once_a_token(plain):
    assert plain["item"] == COUNTED
    assert plain.total() <= COUNTED + 2


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(PACKED, marks=pytest.mark.full),
        evicting(10_000, "triattention"),
        pytest.param(evicting(10_000, "triattention:warmup=1024"), marks=pytest.mark.full),
        pytest.param(evicting(10_000, "recency"), marks=pytest.mark.full),
    ],
    ids=["packed", "triattention", "calibrating", "recency"],
)
def test_a_compressed_cache_adds_no_wait_between_rounds(exact, plain, config):
    """Under budget no round comes; also while it calibrates."""
    decoded = generate(exact, config)
    assert decoded.rounds == 0
    assert decoded.waits == plain + checks(exact)


@pytest.mark.full
@pytest.mark.parametrize("policy", ["triattention", "recency"])
def test_a_round_waits_a_fixed_number_of_times(exact, plain, policy):
    check_rounds(exact, generate(exact, evicting(96, policy)), plain, COUNTED // BLOCK)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("rescue") / "data", embedder="none")
    yield server
    server.stop()


def converse(exact, config, rescue="off"):
    """Return what the second answer of a session waits for, and how many spans were sent to the service."""
    model, tokenizer = exact
    ends = mx.zeros(model.args.vocab_size).at[mx.array(list(tokenizer.eos_token_ids))].add(mx.inf)
    mx.eval(ends)  # in this thread; the session computes in another
    options = {
        "rescue": rescue,
        "prompt_lookup": "off",
        "sampler": lambda logprobs: mx.argmax(logprobs - ends, axis=-1),
    }
    with Session(model, tokenizer, config, **options) as session:
        list(session.respond(load_text()[:600], max_tokens=2))
        pieces = session.respond("And what did it say at its beginning?", max_tokens=SKIPPED + COUNTED)
        decoded = decode(pieces, session.cache)
        if rescue != "off":
            assert session.client.flush(30)
        return decoded, session.client.stats.written if session.client else 0


@pytest.mark.full
def test_to_listen_for_recall_waits_for_nothing(exact):
    """With recall on and nothing archived yet, the queries of every token are kept for a search."""
    plain, _ = converse(exact, PROFILES["off"])
    decoded, _ = converse(exact, evicting(10_000, recall="auto"))
    assert decoded.waits == plain.waits + checks(exact, decoded.blocks + 1)  # the last at the end of the answer


def test_no_token_waits_for_the_archives_thread(exact, monkeypatch):
    """The disk takes nothing until the last token is there; recall meanwhile reloads what waits for it."""
    model, tokenizer = exact
    cache = make_prompt_cache(model, evicting(96, "recency", recall="auto", recall_every=BLOCK))
    sequence, write = layer_group_of(cache), os.pwrite
    done, in_time = threading.Event(), []

    def late(*arguments):
        in_time.append(done.wait(20))
        return write(*arguments)

    monkeypatch.setattr(os, "pwrite", late)
    ids = mx.array(tokenizer.encode(load_text()[:4000])[:PROMPT])
    with compressed_attention(model):
        recall = RecallDuringDecode(cache, RecallResult())
        recall.start()
        for _ in generate_step(ids, model, prompt_cache=cache, max_tokens=COUNTED):
            recall.count_token()
    archived = sequence.archived
    assert sequence.stats.rounds
    assert recall.positions
    assert all(block.pending for block in archived), "nothing is written yet"
    done.set()
    sequence.archive.settle()
    assert in_time == [True] * len(archived)
    assert not any(block.pending for block in archived)
    assert all(map(sequence.archive.read, archived))


@pytest.mark.full
def test_a_session_with_rescue_waits_only_in_rounds(exact, service):
    """The service is asked before the answer; evicted text is sent to it meanwhile, and that waits for no array."""
    plain, _ = converse(exact, PROFILES["off"])
    assert plain.waits["item"] == COUNTED
    assert plain.waits.total() <= COUNTED + 2
    decoded, _ = converse(exact, evicting(10_000), service.url)
    assert decoded.rounds == 0
    assert decoded.waits == plain.waits + checks(exact, decoded.blocks + 1)
    decoded, written = converse(exact, evicting(96, "recency"), service.url)
    check_rounds(exact, decoded, plain.waits, decoded.blocks + 1)
    assert written
