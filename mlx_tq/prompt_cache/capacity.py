"""Which contexts, and how many of them at once, fit into a memory: from the byte counts of the plan."""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_tq.config import KVConfig
from mlx_tq.integration.probe import model_facts, native_caches
from mlx_tq.prompt_cache.compressed import plan_caches
from mlx_tq.prompt_cache.footprint import native_bytes

# Tokens by which mlx-lm's own caches grow.
_NATIVE_STEP = 256
# Tokens of a first reading that shows what caches hold which are kept as they are.
_SAMPLE = 8
# Where a model's configuration names no limit.
_LONGEST = 1 << 20

Bytes = Callable[[int], int]


@dataclass(frozen=True)
class Capacity:
    """What fits with one configuration.

    Attributes:
        profile: its name.
        nbytes: of one context by its tokens.
        longest: tokens of each context by the number of contexts at once; 0 where not even one token fits.
        streams: how many contexts fit by their tokens.
    """

    profile: str
    nbytes: dict[int, int]
    longest: dict[int, int]
    streams: dict[int, int]


def weights_nbytes(model: Any) -> int:
    """Bytes of a model's weights."""
    weights: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    return sum(weight.nbytes for _, weight in weights)


def context_limit(model: Any) -> int:
    """Tokens of the longest context to be counted."""
    return model_facts(model).positions or _LONGEST


def capacities(
    model: Any, configs: Mapping[str, KVConfig], available: int, *, contexts: list[int], streams: list[int]
) -> list[Capacity]:
    """Count what fits with each configuration.

    Args:
        model: of mlx-lm.
        configs: how caches are stored, by name.
        available: bytes for caches.
        contexts: tokens of each context.
        streams: numbers of contexts at once.

    Raises:
        UnsupportedModelError, ConfigError: as `plan_caches`.
    """
    others, lengths = other_bytes(model), range(context_limit(model) + 1)
    found = []
    for profile, config in configs.items():
        count = sequence_bytes(model, config, others)
        longest = {together: bisect_right(lengths, available // together, lo=1, key=count) - 1 for together in streams}
        nbytes = {tokens: count(tokens) for tokens in contexts}
        found.append(Capacity(profile, nbytes, longest, {tokens: available // nbytes[tokens] for tokens in contexts}))
    return found


def sequence_bytes(model: Any, config: KVConfig, others: Bytes) -> Bytes:
    """The bytes of all caches of one sequence by its tokens; `others` are those of `other_bytes`."""
    if config.is_off:
        slots = model_facts(model).slots
        return lambda tokens: others(tokens) + sum(native_bytes(slot, _grown(tokens)) for slot in slots)
    plan = plan_caches(model, config)
    return lambda tokens: others(tokens) + plan.peak_nbytes(tokens)


def other_bytes(model: Any) -> Bytes:
    """The bytes of caches that are kept as they are: a window of tokens, or a state whose size never changes.

    Runs the model once on a few tokens.
    """
    slots = {(slot.index, slot.part) for slot in model_facts(model).slots}
    caches = native_caches(model)
    mx.eval(model(mx.zeros((1, _SAMPLE), mx.int32), cache=caches))
    fixed, windows = 0, []
    for index, cache in enumerate(caches):
        parts = enumerate(cache.caches) if hasattr(cache, "caches") else [(None, cache)]
        for part, each in parts:
            if (index, part) in slots or each.empty():
                continue
            leaves: list[tuple[str, Any]] = tree_flatten(each.state)  # type: ignore[assignment]
            held = sum(leaf.nbytes for _, leaf in leaves if isinstance(leaf, mx.array))
            window = getattr(each, "max_size", None) or getattr(each, "chunk_size", None)
            if window is None:
                fixed += held
            else:
                windows.append((window, held // _SAMPLE))
    return lambda tokens: fixed + sum(min(window, _grown(tokens)) * nbytes for window, nbytes in windows)


def _grown(tokens: int) -> int:
    return -(-tokens // _NATIVE_STEP) * _NATIVE_STEP
