"""Any history of appends, trims, copies and files leaves a cache that equals a plain list of tokens."""

import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np
from cache.tools import random_pair, same_bits
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mlx_tq.cache import CompressedKVCache
from mlx_tq.cache.persist import load_prompt_cache, save_prompt_cache
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.config import KVConfig

BLOCK, HEADS, DIMS, LONGEST = 32, 2, (64, 48), 400
KEYS, VALUES = random_pair(4000, dims=DIMS)  # the tokens that ever arrive, in this order
FORMATS = st.sampled_from([("q8", "tq4"), ("tq4", "tq3"), ("fp16", "tq2"), ("q8_0", "tq3_0"), ("fp8", "q8")])


class Model:
    """A list of tokens, each with whether its original is still there."""

    def __init__(self, prefix, window):
        self.prefix, self.window = prefix, max(window, 1)
        self.tokens = []  # indices into KEYS
        self.lost = []

    def copy(self):
        twin = Model(self.prefix, self.window)
        twin.tokens, twin.lost = list(self.tokens), list(self.lost)
        return twin

    def packed(self):
        """Tokens before this are packed: whole blocks older than the window, and whatever has no original left."""
        by_rule = (len(self.tokens) - self.window) // BLOCK * BLOCK
        without = max((i + 1 for i, lost in enumerate(self.lost) if lost), default=0)
        return max(self.prefix, by_rule, without)

    def append(self, tokens):
        self.tokens += tokens
        self.lost += [False] * len(tokens)
        # The originals of the block that was packed last stay for trims.
        for i in range(self.prefix, self.packed() - BLOCK):
            self.lost[i] = True

    def trim(self, count):
        keep = max(0, len(self.tokens) - count)
        del self.tokens[keep:], self.lost[keep:]


class CacheMachine(RuleBasedStateMachine):
    """Drives a cache and its fork beside their models."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()

    def teardown(self):
        self.folder.cleanup()

    @initialize(formats=FORMATS, prefix=st.sampled_from([0, 1, 32, 40]), window=st.sampled_from([0, 1, 31, 64]))
    def start(self, formats, prefix, window):
        key, value = formats
        self.config = KVConfig(key=key, value=value, prefix=prefix, window=window)
        self.spec = CacheSpec.for_layer(self.config, 0, key, value)
        # The decoded form of every token, whatever arrives beside it.
        layout = self.spec.layout(*DIMS, mx.float16)
        self.decoded = [
            np.array(codec.decode(codec.encode(x)).astype(mx.float16))
            for codec, x in ((layout.key, KEYS), (layout.value, VALUES))
        ]
        self.cache, self.model = CompressedKVCache(self.spec), Model(prefix, window)
        self.other = None  # a fork and its model, which must not notice anything
        self.next = 0

    @rule(count=st.one_of(st.integers(1, 9), st.integers(1, 70)), swap=st.booleans())
    def append(self, count, swap):
        if swap and self.other:
            (self.cache, self.model), self.other = self.other, (self.cache, self.model)
        if len(self.model.tokens) >= LONGEST:
            return
        tokens = [(self.next + i) % KEYS.shape[2] for i in range(count)]
        self.next += count
        index = mx.array(tokens)
        view = self.cache.append(mx.take(KEYS, index, axis=2), mx.take(VALUES, index, axis=2))
        self.model.append(tokens)
        assert view.key_shape() == (1, HEADS, len(self.model.tokens), DIMS[0])
        assert view.value_shape() == (1, HEADS, len(self.model.tokens), DIMS[1])

    @rule(count=st.one_of(st.integers(0, 40), st.integers(0, 500)))
    def trim(self, count):
        assert self.cache.trim(count) == min(count, len(self.model.tokens))
        self.model.trim(count)

    @rule(onto_fork=st.booleans())
    def fork(self, onto_fork):
        twin, model = self.cache.fork(), self.model.copy()
        if onto_fork:
            self.cache, twin = twin, self.cache
        self.other = twin, model

    @rule()
    def through_state(self):
        again = CompressedKVCache.from_state(self.cache.state)
        assert same_bits(again.state, self.cache.state)
        self.cache = again

    @rule()
    def through_file(self):
        path = Path(self.folder.name) / "cache.safetensors"
        save_prompt_cache(path, [self.cache], model="machine", config=self.config)
        (again,) = load_prompt_cache(path, model="machine", config=self.config).caches
        assert same_bits(again.state, self.cache.state)
        self.cache = again

    @invariant()
    def equals_the_list(self):
        for cache, model in [(self.cache, self.model), *([self.other] if self.other else [])]:
            self.check(cache, model)

    def check(self, cache, model):
        length = len(model.tokens)
        assert (cache.offset, cache.size(), list(cache.positions)) == (length, length, list(range(length)))
        assert cache.body_tokens == model.packed() - model.prefix
        cache.check_health()
        if cache.empty():
            assert length == 0
            return
        arrays = [np.array(handle.materialize()) for handle in cache.keys_and_values()]
        for array, original, decoded in zip(arrays, (KEYS, VALUES), self.decoded, strict=True):
            wanted = np.array(original)[:, :, model.tokens]
            body = slice(model.prefix, model.packed())
            wanted[:, :, body] = decoded[:, :, model.tokens[body]]
            assert np.array_equal(array, wanted)


CacheMachine.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestCacheMachine = CacheMachine.TestCase
