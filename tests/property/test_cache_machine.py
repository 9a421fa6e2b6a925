"""Any history of appends, trims, copies, files and rounds leaves a cache that equals a plain list of tokens.

In every format that does not learn from what it stores; keys of one format, of two, normalized, and with tokens that
leave, for good or to come back.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from cache.tools import MODEL, PAIRS, make_spec, random, random_pair, same_bits
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mlx_tq.cache.batch import BatchCompressedKVCache
from mlx_tq.cache.normalizer import SKIP, KeyNormalizer
from mlx_tq.codec.formats import CodecOptions, format_names, get_format
from mlx_tq.codec.normalization import KeyNormalization, compute_block_means, decode_keys, denormalize
from mlx_tq.config import Budget, EvictConfig, KVConfig
from mlx_tq.errors import CacheFormatError, ConfigError
from mlx_tq.prompt_cache.build import make_cache
from mlx_tq.prompt_cache.cache_file import load_prompt_cache, save_prompt_cache
from mlx_tq.prompt_cache.layer_group import EvictionPlan, LayerGroup, begin_pass, layer_group_of

BLOCK, HEADS, DIMS, LONGEST = 32, 2, (128, 64), 400
LEARNED, READY, MEAN = 128, 136, 128  # tokens that weights come from, the length at which they are known, of a mean
RECENT, ROOM, TRIGGER = 32, 20, 8  # packed tokens with recent keys; budget above sinks and window
KEYS, VALUES = random_pair(1000, dims=DIMS)  # the tokens that ever arrive, in this order
QUERIES = random(1000, heads=2 * HEADS, dim=DIMS[0], seed=9)  # theirs
LAYERS = 2
RECALLS = ("recalls", "recalls", "recalls heads", "recalls tq2", "recalls q8_0")  # kinds of caches with an archive
EVICTS = ("evicts", "evicts", "evicts heads", "evicts tq2", "evicts q8_0")  # of those without
RETRIEVAL, EVERY = (1,), (0, 1)  # heads
# A BLAS may round these formats' rotation otherwise for another number of rows, and a value between two levels then has
# the other code: less than a quarter of a vector, where another token's vector is 1.4 of it away.
MULTIPLIED, ANOTHER_CODE = {"tbq3_0", "tbq4_0"}, 0.25


def formats_of(dim, *, keys):
    """The formats that store vectors of this size, without those that learn."""
    found = []
    for name in format_names():
        try:
            codec = get_format(name).codec(dim, CodecOptions(), mx.float16)
        except ConfigError:
            continue
        if not codec.learned_bytes and (keys or not get_format(name).keys_only):
            found.append(name)
    return found


class Model:
    """A list of tokens, and the positions before which originals, recent keys, and any trim, are gone."""

    def __init__(self, spec):
        self.spec, self.tokens, self.gone = spec, [], frozenset()  # indices into KEYS; positions that left
        self.originals = self.recents = spec.sinks
        self.floor = 0
        self.archived, self.back = frozenset(), frozenset()  # positions that can come back, and that are back for now
        self.alone = False  # layers from a state, which are no sequence until the next pass
        self.stored = []  # of each packed position: its key, value and cold key as they are read, [H, D] each
        self.weights, self.means = None, {}  # of normalized keys; the means by block
        self.forgets = True  # the weights, in a trim to where they were unknown

    def copy(self):
        twin = Model(self.spec)
        vars(twin).update(vars(self), tokens=list(self.tokens), stored=list(self.stored), means=dict(self.means))
        return twin

    def by_rule(self, length):
        """Tokens before this are packed at a length: whole blocks older than the window, once weights are known."""
        packed = (length - self.spec.window) // BLOCK * BLOCK
        early = self.spec.normalize and packed + self.spec.window < READY
        return self.spec.sinks if early else max(self.spec.sinks, packed)

    @property
    def packed(self):
        """Tokens before this are packed: by rule, or for want of an original."""
        return max(self.by_rule(len(self.tokens)), self.originals)

    @property
    def cold(self):
        return max(self.packed - RECENT, self.recents) if self.spec.cold else self.spec.sinks

    @property
    def live(self):
        return [p for p in range(len(self.tokens)) if p not in self.gone]

    def append(self, tokens):
        self.tokens += tokens
        if self.spec.normalize and self.weights is None and len(self.tokens) >= READY:
            first = mx.array(self.tokens[:LEARNED])
            known = KeyNormalizer().add_queries(mx.take(QUERIES, first, axis=2), HEADS, 0)
            self.weights = known.learn(mx.take(KEYS, first, axis=2), PAIRS).scale
        self.forgets = self.forgets and len(self.tokens) < READY + BLOCK
        self.pack()
        # What was packed last stays in its earlier form for as long as a trim of a block leads back to it.
        earlier = self.by_rule(self.packed + self.spec.window - BLOCK)
        self.originals = max(self.originals, earlier)
        self.recents = max(self.recents, earlier - RECENT)

    def pack(self):
        start, stop = self.spec.sinks + len(self.stored), self.packed
        if stop == start:
            return
        layout, normalization = self.spec.layout(*DIMS, mx.float16), None
        keys, values = (self.taken(x, start, stop) for x in (KEYS, VALUES))
        if self.spec.normalize:
            which = [(position - self.spec.sinks) // MEAN for position in range(start, stop)]
            means = mx.concatenate([self.mean(block, layout.key.rotation) for block in sorted(set(which))], axis=2)
            normalization = KeyNormalization(self.weights, means, mx.array(which) - which[0])
        rows = layout.encode(keys, values, normalization).rows
        found = [decode_keys(layout.key, layout.keys(rows), normalization), layout.value.decode(layout.values(rows))]
        found.append(found[0])
        if self.spec.cold:
            codec = self.spec.cold_layout(layout, mx.float16).key
            again = codec.decode(codec.encode(layout.key.decode(layout.keys(rows))))
            found[2] = denormalize(again, normalization, layout.key.rotation) if normalization else again
        found = [np.array(x[0].swapaxes(0, 1).astype(mx.float16)) for x in found]
        self.stored += zip(*found, strict=True)

    def mean(self, block, rotation):
        """Of a block's first tokens: as many as are there when the first of them are packed."""
        if block not in self.means:
            first = self.spec.sinks + block * MEAN
            stop = min(first + MEAN, (first // BLOCK + 1) * BLOCK + self.spec.window)
            self.means[block] = compute_block_means(
                self.taken(KEYS, first, stop)[:, :, None], self.weights, rotation
            ).means
        return self.means[block]

    def taken(self, array, start, stop):
        """What the tokens at positions [start, stop) have in KEYS, VALUES or QUERIES."""
        assert stop <= len(self.tokens)
        return mx.take(array, mx.array(self.tokens[start:stop]), axis=2)

    def trim(self, count):
        del self.tokens[max(0, len(self.tokens) - count) :]
        self.originals, self.recents = (
            max(self.spec.sinks, min(lost, len(self.tokens))) for lost in (self.originals, self.recents)
        )
        del self.stored[self.packed - self.spec.sinks :]
        self.means = {b: mean for b, mean in self.means.items() if self.spec.sinks + b * MEAN < self.packed}
        if len(self.tokens) < (READY if self.forgets else SKIP + 1) and not self.stored:
            self.weights, self.forgets = None, True

    def lose(self, positions, *, archives=False):
        self.gone |= set(positions)
        self.archived |= set(positions) if archives else set()
        self.originals, self.recents, self.floor = self.packed, self.cold, self.packed

    def exchange(self, wanted):
        """Have these positions back and no others; where all are, a trim leads anywhere, to packed tokens."""
        leaving, coming = self.back - wanted, wanted - self.back
        self.gone, self.archived = (self.gone | leaving) - wanted, self.archived | leaving
        self.back = wanted
        assert all(position < self.cold for position in wanted) or not self.spec.cold
        if leaving or coming:
            self.originals, self.recents, self.floor = self.packed, self.cold, self.packed if self.gone else 0

    def rewind(self, count):
        """Before a trim: blocks that the window then reaches come back, for good. False where they cannot."""
        length = len(self.tokens) - count
        since = self.spec.sinks + max(0, length - self.spec.window - self.spec.sinks) // BLOCK * BLOCK
        needed = {p for p in self.gone if since <= p < length}
        if needed - self.archived or self.alone:
            return length >= self.floor
        if needed:
            self.originals, self.recents = self.packed, self.cold
        self.gone, self.archived, self.back = (
            frozenset(p for p in positions if p < since) for positions in (self.gone, self.archived, self.back)
        )
        self.floor = min(self.packed if needed else self.floor, length) if self.gone else 0
        return True


class CacheMachine(RuleBasedStateMachine):
    """Drives the layers of a cache and a copy of them beside their models."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()

    def teardown(self):
        self.folder.cleanup()

    @initialize(
        key=st.sampled_from(formats_of(DIMS[0], keys=True)),
        kind=st.sampled_from(["plain", "tq2", "q8_0", *EVICTS, *RECALLS]),
        value=st.sampled_from(formats_of(DIMS[1], keys=False)),
        sinks=st.sampled_from([0, 1, 40]),
        window=st.sampled_from([0, 1, 31]),
        normalize=st.booleans(),
    )
    def start(self, key, kind, value, sinks, window, normalize):
        self.recalls, cold = kind.startswith("recalls"), kind.split()[-1]
        evicts = self.recalls or kind.startswith("evicts")
        key = f"{key}~{cold}" if cold in format_names() and cold != key else key
        sizes = {"sinks": sinks, "window": window, "recent": RECENT, "normalize": normalize}
        self.config, self.spec = KVConfig(key=key, value=value, **sizes), make_spec(key, value, **sizes)
        self.by_head = kind.endswith("heads")
        if self.by_head:  # the window of streaming heads is as long as any pass
            self.spec = replace(self.spec, retrieval_heads=RETRIEVAL, head_window=LONGEST, head_sinks=sinks)
        self.exact = MULTIPLIED.isdisjoint({self.spec.key, self.spec.cold}), self.spec.value not in MULTIPLIED
        sequence = None
        if evicts:
            config = EvictConfig(f"random:trigger={TRIGGER}:granularity=1", recall="auto" if self.recalls else "off")
            sequence = LayerGroup(EvictionPlan(config, Budget(tokens=sinks + self.spec.window + ROOM), LAYERS), {})
        self.caches = [make_cache(self.spec, number, sequence) for number in range(LAYERS)]
        self.model = Model(self.spec)
        self.other = None  # a copy and its model, which must not notice anything
        self.next = 0
        for count in (90, 90, 30) if self.recalls else ():  # something has left
            self.append(count)

    @rule(count=st.integers(1, 9))
    def append_a_few(self, count):
        self.append(count)

    @rule(count=st.integers(30, 100), times=st.integers(1, 3))
    def append_many(self, count, times):
        for _ in range(times):
            self.append(count)

    @rule()
    def swap(self):
        if self.other:
            (self.caches, self.model), self.other = self.other, (self.caches, self.model)

    def append(self, count):
        if len(self.model.tokens) >= LONGEST:
            return
        self.lose(count)
        tokens = [(self.next + i) % KEYS.shape[2] for i in range(count)]
        self.next += count
        self.model.append(tokens)
        for cache in self.caches:
            keys, values, queries = (mx.take(x, mx.array(tokens), axis=2) for x in (KEYS, VALUES, QUERIES))
            view = cache.append(keys, values)
            most = len(self.model.tokens if self.by_head else self.model.live)
            assert view.key_shape() == (1, HEADS, most, DIMS[0])
            assert view.value_shape() == (1, HEADS, most, DIMS[1])
            if view.listeners:
                view.attend(queries, 1.0, "causal", None)

    def lose(self, count):
        """What a pass of `count` tokens begins with."""
        model, length = self.model, len(self.model.tokens)
        assert not begin_pass(self.caches, count)
        model.alone = False
        sequence = layer_group_of(self.caches)
        if sequence is None:
            return
        gone = sorted(set(sequence.evicted.tolist()) - model.gone - model.back)
        tiers = self.recalls and self.spec.cold  # of which only cold rows leave
        latest = self.spec.window + (RECENT + BLOCK if tiers else 0)
        allowed = max(self.spec.sinks + self.spec.window + ROOM, latest + 1)
        end = min(model.packed, length - self.spec.window, model.cold if tiers else length)
        eligible = [p for p in model.live if self.spec.sinks <= p < end]
        eligible = [p for p in eligible if p not in model.back]
        excess = len(model.live) - len(model.back) - allowed
        assert len(gone) == (min(excess, len(eligible)) if excess > TRIGGER else 0)
        assert set(gone) <= set(eligible)
        if gone:
            model.lose(gone, archives=self.recalls)

    @rule(which=st.sets(st.integers(0, 7), min_size=1))
    def recall(self, which):
        """Have some blocks of the archive back, and no others."""
        if self.recalls and self.model.tokens:
            sequence, self.model.alone = layer_group_of(self.caches), False
            assert {p for block in sequence.archived for p in block.positions.tolist()} == self.model.archived
            chosen = [block for number, block in enumerate(sequence.archived) if number % 8 in which]
            wanted = frozenset(p for block in chosen for p in block.positions.tolist())
            assert set(sequence.replace_recalled(self.caches, chosen).tolist()) == wanted - self.model.back
            self.model.exchange(wanted)

    @rule()
    def release(self):
        if self.recalls:
            layer_group_of(self.caches).drop_recalled(self.caches)
            self.model.alone = False
            self.model.exchange(frozenset())

    @rule(count=st.one_of(st.integers(0, 40), st.integers(0, 300)))
    def trim(self, count):
        length = len(self.model.tokens)
        fits = self.model.rewind(min(count, length))
        for cache in self.caches:
            if fits:
                assert cache.trim(count) == min(count, length)
            else:
                with pytest.raises(CacheFormatError, match="back past an eviction: some positions"):
                    cache.trim(count)
        if fits:
            self.model.trim(count)

    @rule(onto_copy=st.booleans(), how=st.sampled_from(["fork", "merge", "extract"]))
    def copy(self, onto_copy, how):
        make = {
            "fork": lambda cache: cache.fork(),
            "merge": lambda cache: BatchCompressedKVCache.merge([cache]).rows[0],
            "extract": lambda cache: BatchCompressedKVCache([cache]).extract(0),
        }[how]
        twins, model = [make(cache) for cache in self.caches], self.model.copy()
        if onto_copy:
            self.caches, twins = twins, self.caches
        self.other = twins, model

    @rule(through=st.sampled_from(["state", "file"]))
    def store(self, through):
        if through == "state":
            again = [type(cache).from_state(cache.state) for cache in self.caches]
            self.model.archived, self.model.alone = frozenset(), True
        else:
            path = Path(self.folder.name) / "cache.safetensors"
            save_prompt_cache(path, self.caches, model=MODEL, config=self.config)
            again = load_prompt_cache(path, model=MODEL, config=self.config).caches
            self.model.alone = False
        assert all(same_bits(new.state, old.state) for new, old in zip(again, self.caches, strict=True))
        self.caches = again

    @invariant()
    def equals_the_list(self):
        for caches, model in [(self.caches, self.model), *([self.other] if self.other else [])]:
            for cache in caches:
                self.check(cache, model)

    def check(self, cache, model):
        sinks, live = self.spec.sinks, model.live
        every = list(range(len(model.tokens)))
        assert (cache.offset, cache.size()) == (len(every), len(every if self.by_head else live))
        if self.by_head and model.gone:
            assert [x.tolist() for x in cache.positions] == [every if head in RETRIEVAL else live for head in EVERY]
        else:
            assert cache.positions.tolist() == live
        body = [p for p in range(sinks, model.packed) if p not in model.gone]
        assert cache.packed_tokens == len(body)
        assert cache.packed_positions.tolist() == [p for p in body if p < len(model.tokens)]
        cache.check_health()
        if cache.empty():
            assert not model.tokens
            return
        if not self.by_head:
            self.compare(EVERY, live, model, [handle.materialize() for handle in cache.keys_and_values()])
        for head in EVERY if self.by_head else ():
            regions = cache.keys_and_values()[0].view.merged_regions().head(head)
            self.compare((head,), every if head in RETRIEVAL else live, model, regions.decode())

    def compare(self, heads, positions, model, contents):
        """Compare keys and values of some heads with what the list has at these positions."""
        for number, (array, original) in enumerate(zip(contents, (KEYS, VALUES), strict=True)):
            wanted = np.array(original)[0][:, np.array(model.tokens, int)[positions]]  # [H, S, D]
            for row, position in enumerate(positions):
                if self.spec.sinks <= position < model.packed:
                    wanted[:, row] = model.stored[position - self.spec.sinks][number or 2 * (position < model.cold)]
            found, wanted = np.array(array)[0], wanted[list(heads)]
            if self.exact[number]:
                assert np.array_equal(found, wanted)
            else:
                wrong = np.linalg.norm((found - wanted).astype(np.float32), axis=-1)
                assert (wrong <= ANOTHER_CODE * np.linalg.norm(wanted.astype(np.float32), axis=-1)).all()


def histories(count):
    """The test of so many random histories, always the same."""
    found = type("TestCase", (CacheMachine.TestCase,), {})
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    found.settings = settings(
        max_examples=count, stateful_step_count=25, deadline=None, derandomize=True, suppress_health_check=slow
    )
    return found


TestCacheMachine = histories(5)
TestCacheMachineAtLength = pytest.mark.full(histories(60))


@pytest.mark.parametrize("normalize", [False, True])
def test_tokens_of_both_tiers_leave(normalize):
    """In several rounds, with tokens in between that go cold behind those that left."""
    state = CacheMachine()
    state.start(key="q8", kind="evicts tq2", value="tq4", sinks=1, window=31, normalize=normalize)
    for _ in range(4):
        state.append_many(count=61, times=1)
        state.append_a_few(count=1)
        state.equals_the_list()
    assert min(state.model.gone) < state.model.cold <= max(state.model.gone) + RECENT
    state.copy(onto_copy=True, how="fork")
    state.store(through="file")
    state.equals_the_list()
    state.teardown()


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("kind", ["evicts", "evicts heads"])
def test_a_trim_past_a_round_is_refused_and_changes_nothing(kind, normalize):
    """Histories by chance seldom trim so deep after a round."""
    state = CacheMachine()
    state.start(key="q8", kind=kind, value="tq4", sinks=1, window=31, normalize=normalize)
    state.append_many(count=70, times=3)
    state.append_many(count=1, times=1)  # a pass begins with the round
    assert state.model.gone
    state.trim(count=200)
    state.equals_the_list()
    state.trim(count=len(state.model.tokens) - state.model.floor)
    state.equals_the_list()
    state.append_a_few(count=9)
    state.equals_the_list()
    state.teardown()


@pytest.mark.parametrize("normalize", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize("kind", [*RECALLS[2:4], pytest.param(RECALLS[4], marks=pytest.mark.full)])
def test_what_comes_back_is_trimmed_copied_saved_and_leaves_again(kind, normalize):
    state = CacheMachine()
    state.start(key="tq4", kind=kind, value="tq4", sinks=1, window=31, normalize=normalize)
    for then in (
        lambda: state.recall(which={0, 2}),
        lambda: state.append_many(count=70, times=1),
        lambda: state.copy(onto_copy=False, how="merge"),
        lambda: state.recall(which={1, 2}),
        lambda: state.trim(count=110),
        lambda: state.append_many(count=61, times=2),
        lambda: state.store(through="file"),
        lambda: state.recall(which=set(range(8))),
        lambda: state.trim(count=120),
        state.release,
        state.swap,
        state.release,
        lambda: state.recall(which={0, 1}),
        lambda: state.store(through="state"),  # which has no archive
        state.release,
        lambda: state.recall(which={1}),
        lambda: state.trim(count=120),
    ):
        then()
        state.equals_the_list()
        assert state.model.gone or state.model.back
    state.store(through="state")
    state.trim(count=20)  # to where nothing is archived any more
    state.equals_the_list()
    state.teardown()


def test_means_leave_with_the_tokens_of_their_blocks():
    """In a trim of whole blocks, and in rounds: the next tokens have means of their own."""
    state = CacheMachine()
    state.start(key="tq4", kind="plain", value="q8", sinks=0, window=0, normalize=True)
    state.append_many(count=100, times=3)
    state.trim(count=200)
    state.equals_the_list()
    state.append_many(count=100, times=2)
    state.equals_the_list()
    state.teardown()
