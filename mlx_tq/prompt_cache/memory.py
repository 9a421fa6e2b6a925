"""Bytes of caches at a context length, from the shape of a model alone, and how many contexts fit into a memory."""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.utils import tree_reduce
from mlx_lm.models.cache import ArraysCache

from mlx_tq.cache.recurrent_states import EXACT, StateStorage, StoredStates, has_states, is_state, states_of
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.codec.formats import get_format
from mlx_tq.config import DEFAULT_PROFILE, PROFILES, KVConfig
from mlx_tq.errors import ConfigError, UnsupportedModelError
from mlx_tq.integration.probe import SlotFacts, model_facts, native_caches
from mlx_tq.prompt_cache.compressed import plan_caches
from mlx_tq.prompt_cache.layer_bytes import native_cache_bytes, native_capacity, native_row_bytes
from mlx_tq.prompt_cache.layer_group import EvictionPlan, cache_arrays
from mlx_tq.prompt_cache.plan import LayerPlan, Plan, budget_in_tokens, choose_formats
from mlx_tq.prompt_cache.transient import activation_nbytes, attention_nbytes, growth_nbytes, selection_nbytes

PREFILL_STEP = 256  # tokens, the shortest that --memory chooses
MAX_PREFILL_STEP = 2048  # tokens; longer steps prefill no prompt faster
_PROBE_TOKENS = 8
_SMALL_STATE_STEP = 512  # tokens after which states are stored that take no more than these tokens' KV
_DEFAULT_LIMIT = 1 << 20  # tokens, if a model's configuration names no limit

Bytes = Callable[[int], int]


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of a cache, and of mlx-lm's own.

    Attributes:
        body: packed tokens; with eviction, the most that stay between two forward passes.
        sinks: first tokens, in full precision.
        window: recent tokens in full precision, the block in progress and the slack for trims included.
        allocated: all arrays of the cache, which have room for more tokens; the `nbytes` of the cache.
        native: all arrays of mlx-lm's own cache of the same tokens, evicted ones included, at 16 bits.
    """

    body: int
    sinks: int
    window: int
    allocated: int
    native: int

    @property
    def total(self) -> int:
        """Bytes of the stored tokens alone."""
        return self.body + self.sinks + self.window

    @property
    def ratio(self) -> float:
        """How many times smaller than mlx-lm's own cache the cache is, both as allocated."""
        return self.native / self.allocated


def memory_report(
    seq_len: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    config: KVConfig = PROFILES[DEFAULT_PROFILE],
) -> MemoryReport:
    """Return the bytes of `seq_len` tokens of a 16-bit model whose layers all have plain KV caches.

    Raises:
        ConfigError: a size below 1, a head_dim that a format does not support, or an invalid budget.
    """
    for name, size in (("seq_len", seq_len), ("num_layers", num_layers), ("num_kv_heads", num_kv_heads)):
        if size < 1:
            raise ConfigError(f"{name} is {size}; it must be 1 or more.")
    get_format("fp16").bytes_per_vector(head_dim)  # raises for a head_dim that cannot be stored
    slots = [
        SlotFacts(layer, None, num_kv_heads, head_dim, head_dim, "float16", 1.0, shared=False)
        for layer in range(num_layers)
    ]
    native = sum(native_cache_bytes(slot, seq_len) for slot in slots)
    if config.is_off:
        stored = sum(native_row_bytes(slot, seq_len) for slot in slots)
        return MemoryReport(body=0, sinks=0, window=stored, allocated=native, native=native)
    plain = replace(config, outlier=0)  # no key norms are known
    formats = [choose_formats(plain, slot.index, num_layers) for slot in slots]
    layers = [
        LayerPlan(slot, CacheSpec.for_layer(config, slot.index, key, value), note)
        for slot, (key, value, note) in zip(slots, formats, strict=True)
    ]
    plan = Plan("", config, [], layers, list)
    if config.evict is not None:
        budget = budget_in_tokens(plan, config.evict)
        plan = replace(plan, eviction=EvictionPlan(config.evict, budget, num_layers))
    regions = plan.bytes_at(seq_len)
    return MemoryReport(regions.packed, regions.sinks, regions.window, regions.allocated, native)


@dataclass(frozen=True)
class Capacity:
    """The contexts that fit with one configuration."""

    profile: str
    nbytes: dict[int, int]  # of one context, by its tokens
    longest: dict[int, int]  # tokens of each context, by the number of contexts at once; 0 if not one token fits
    streams: dict[int, int]  # how many contexts fit, by their tokens


def capacities(
    model: Any, configs: Mapping[str, KVConfig], available: int, *, contexts: list[int], streams: list[int]
) -> list[Capacity]:
    """Count what fits into `available` bytes with each named configuration, what prefill takes included.

    `contexts` are tokens of a context, `streams` numbers of contexts at once, which are prefilled one after another in
    steps of PREFILL_STEP tokens. Raises as `plan_caches` does.
    """
    others, lengths = other_bytes(model), range(context_limit(model) + 1)
    rows = []
    for profile, config in configs.items():
        count, transient = sequence_bytes(model, config, others), transient_bytes(model, config, PREFILL_STEP)
        longest = {
            together: bisect_right(lengths, available, lo=1, key=partial(_total, together, count, transient)) - 1
            for together in streams
        }
        nbytes = {tokens: count(tokens) for tokens in contexts}
        fitting = {tokens: max(0, available - transient(tokens)) // nbytes[tokens] for tokens in contexts}
        rows.append(Capacity(profile, nbytes, longest, fitting))
    return rows


def _total(together: int, count: Bytes, transient: Bytes, tokens: int) -> int:
    return together * count(tokens) + transient(tokens)


def weights_nbytes(model: Any) -> int:
    total = tree_reduce(lambda total, weight: total + weight.nbytes, model.parameters(), 0)  # type: ignore[no-untyped-call]
    return int(total)


def context_limit(model: Any) -> int:
    """Return the tokens of the longest context to count."""
    return model_facts(model).positions or _DEFAULT_LIMIT


def sequence_bytes(model: Any, config: KVConfig, others: Bytes, step: int = 1) -> Bytes:
    """Return the bytes of all caches of one sequence by its tokens, after passes of at most `step` tokens.

    `others` comes from `other_bytes`.
    """
    if config.is_off:
        facts = model_facts(model)
        rest = sum(part.token_nbytes for part in facts.uncompressed)
        return lambda tokens: (
            others(tokens)
            + rest * native_capacity(tokens)
            + sum(native_cache_bytes(slot, tokens) for slot in facts.slots)
        )
    plan = plan_caches(model, config)
    return lambda tokens: others(tokens) + plan.cache_peak_nbytes(tokens, step)


def transient_bytes(model: Any, config: KVConfig, step: int) -> Bytes:
    """Return the bytes that a pass of `step` tokens of a sequence takes for a moment, by the sequence's tokens."""
    if not config.is_off:
        plan = plan_caches(model, config)
        return lambda tokens: plan.transient_nbytes(tokens, step)
    facts = model_facts(model)

    selecting = {part.index for part in facts.uncompressed}

    def count(tokens: int) -> int:
        layer = max(
            attention_nbytes(slot, tokens, step, compressed=False)
            + growth_nbytes(slot, tokens)
            + (selection_nbytes(slot, tokens, step) if slot.index in selecting else 0)
            for slot in facts.slots
        )
        return layer + activation_nbytes(facts.slots, facts.activations, min(step, tokens))

    return count


def probe_states(model: Any) -> list[ArraysCache]:
    """Return the caches of a model's recurrent layers after a few tokens, not evaluated."""
    caches = native_caches(model)
    if has_states(caches):
        model(mx.zeros((1, _PROBE_TOKENS), mx.int32), cache=caches)
    return states_of(caches)


def state_nbytes(model: Any, state_format: str) -> int:
    """Return the bytes of a model's recurrent states of one sequence, in one of the `STATE_FORMATS`.

    Inputs of convolutions are included. They stay exact.
    """
    return sum(StoredStates(cache, state_format).nbytes for cache in probe_states(model))


def choose_state_storage(model: Any, storage: StateStorage) -> StateStorage | None:
    """Return how the states of a model are stored, with a shorter step if they are small; None without states.

    Raises:
        ConfigError: the format is q8, and the model has no state that it would encode.
    """
    states = probe_states(model)
    if not states:
        return None
    nbytes = sum(StoredStates(cache, EXACT).nbytes for cache in states)
    if any(is_state(entry) for cache in states for entry in cache.cache):
        return storage
    if storage.format != EXACT:
        raise ConfigError(
            f"the state format {storage.format} saves nothing for this model: none of its states are arrays "
            f"[batch, heads, channels, numbers], which alone it encodes. Valid is {EXACT}."
        )
    try:
        step_nbytes = sum(native_row_bytes(slot, _SMALL_STATE_STEP) for slot in model_facts(model).slots)
    except UnsupportedModelError:  # as it keeps nothing but states
        return storage
    return storage if nbytes > step_nbytes else replace(storage, step=min(storage.step, _SMALL_STATE_STEP))


def other_bytes(model: Any) -> Bytes:
    """Return the bytes of caches that do not grow with the tokens: a window of tokens, or a state of fixed size.

    If there are such caches, the model is called on a few tokens, and nothing is evaluated.
    """
    facts = model_facts(model)
    growing = {(slot.index, slot.part) for slot in facts.slots}
    growing |= {(part.index, part.part) for part in facts.uncompressed}
    caches = native_caches(model)
    others = []
    for index, cache in enumerate(caches):
        parts = enumerate(cache.caches) if hasattr(cache, "caches") else [(None, cache)]
        others += [part for number, part in parts if (index, number) not in growing]
    if others:
        model(mx.zeros((1, _PROBE_TOKENS), mx.int32), cache=caches)
    fixed, windows = 0, []
    for part in others:
        if part.empty():
            continue
        nbytes = sum(array.nbytes for array in cache_arrays(part))
        window = getattr(part, "max_size", None) or getattr(part, "chunk_size", None)
        if window is None:
            fixed += nbytes
        else:
            windows.append((window, nbytes // _PROBE_TOKENS))
    return lambda tokens: fixed + sum(min(window, native_capacity(tokens)) * nbytes for window, nbytes in windows)
