"""Recurrent states in stored caches: exact, or as 8-bit codes with a scale per head and channel.

A state is an array [B, H, C, N] of a linear-attention or state-space layer. Each row of N numbers has a scale:

    scale = bfloat16(max |row| / 127)    codes = round(row / scale)    error <= scale / 2

Rounded to bfloat16, a scale grows or shrinks by at most 1/256, so the largest code is still 127, and decoded states are
encoded to the same codes. Such a layer also keeps the last inputs of its convolution, which are small and stay exact.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList

from mlx_tq.cache.layer import cache_parts
from mlx_tq.codec.formats.base import dtype_name, dtype_of
from mlx_tq.errors import CacheFormatError, ConfigError, unknown_name

EXACT, Q8 = STATE_FORMATS = "exact", "q8"
_MAX_CODE = 127
_LEAST_STEP = 32


@dataclass(frozen=True)
class StateStorage:
    """How the recurrent states of prompts are stored, in memory and on disk.

    Attributes:
        format: "exact", or "q8" for 8-bit codes.
        step: number of tokens between the stored states of a prompt. States are also stored at the end of each turn. A
            prompt that diverges in between continues from the last states before that point.

    Raises:
        ConfigError: another format, or a step below 32.
    """

    format: str = EXACT
    step: int = 2048

    def __post_init__(self) -> None:
        if self.format not in STATE_FORMATS:
            raise unknown_name("state format", self.format, STATE_FORMATS)
        if self.step < _LEAST_STEP:
            raise ConfigError(f"the state step is {self.step}; it must be {_LEAST_STEP} tokens or more.")

    def is_due(self, tokens: int, stored: int) -> bool:
        """Return whether to store the states after `tokens` tokens, if they were last stored after `stored`."""
        return tokens // self.step > stored // self.step


DEFAULT_STATES = StateStorage()


class PackedState(NamedTuple):
    """The codes of a state, int8 [B, H, C, N], and the scales of its rows, bfloat16 [B, H, C, 1]."""

    codes: mx.array
    scales: mx.array


def has_states(caches: Sequence[Any]) -> bool:
    """Return whether some layers have states, which cannot be trimmed to fewer tokens."""
    return bool(states_of(caches))


def is_state(array: Any) -> bool:
    """Return whether an array of an `ArraysCache` is a state, not the last inputs of a convolution."""
    return (
        isinstance(array, mx.array)
        and array.ndim == 4
        and array.shape[2] > 1
        and mx.issubdtype(array.dtype, mx.floating)
    )


def pack_state(state: mx.array) -> PackedState:
    """Encode a state. A row that contains a non-finite value decodes to non-finite values only."""
    rows = state.astype(mx.float32)
    scales = (mx.abs(rows).max(axis=-1, keepdims=True) / _MAX_CODE).astype(mx.bfloat16)
    divisors = mx.where(scales == 0, 1, scales).astype(mx.float32)
    codes = mx.clip(mx.round(rows / divisors), -_MAX_CODE, _MAX_CODE).astype(mx.int8)
    return PackedState(codes, scales)


def unpack_state(packed: PackedState, dtype: mx.Dtype) -> mx.array:
    """Decode a state; raise CacheFormatError if codes and scales do not fit together."""
    codes, scales = packed
    fits = codes.ndim == 4 and scales.shape == (*codes.shape[:-1], 1)
    if not fits or (codes.dtype, scales.dtype) != (mx.int8, mx.bfloat16):
        raise CacheFormatError(
            f"a state has {codes.dtype} codes {codes.shape} and {scales.dtype} scales {scales.shape}, which do not fit"
        )
    # A scale that was rounded up would take the largest numbers of the type beyond it.
    most, factors = mx.finfo(dtype).max, scales.astype(mx.float32)
    rows = codes.astype(mx.float32) * factors
    return mx.where(mx.isfinite(factors), mx.clip(rows, -most, most), rows).astype(dtype)


def array_shapes(caches: Sequence[Any]) -> list[tuple[tuple[int, ...], mx.Dtype] | None]:
    """Return the shape and type of each array of the layers with states, None for one that is missing."""
    arrays = [entry for part in states_of(caches) for entry in part.cache]
    return [None if array is None else (array.shape, array.dtype) for array in arrays]


class StoredStates:
    """The content of an `ArraysCache` with its states in a storage format; a model needs `unpack` to continue."""

    def __init__(self, cache: ArraysCache, state_format: str) -> None:
        packs = [state_format != EXACT and is_state(entry) for entry in cache.cache]
        entries = [*zip(cache.cache, packs, strict=True)]
        self._types = [dtype_name(entry.dtype) if packed else None for entry, packed in entries]
        self._entries = [pack_state(entry) if packed else entry for entry, packed in entries]

    @property
    def state(self) -> list[Any]:
        return self._entries

    @property
    def nbytes(self) -> int:
        entries = [entry if isinstance(entry, PackedState) else [entry] for entry in self._entries]
        return sum(array.nbytes for arrays in entries for array in arrays if array is not None)

    def empty(self) -> bool:
        return self._entries[0] is None

    def is_trimmable(self) -> bool:
        return False

    def unpack(self) -> ArraysCache:
        cache = ArraysCache(len(self._entries))
        cache.cache = [
            entry if dtype is None else unpack_state(entry, dtype_of(dtype))
            for entry, dtype in zip(self._entries, self._types, strict=True)
        ]
        return cache


def pack_states(caches: Sequence[Any], state_format: str) -> list[Any]:
    """Return caches of one sequence with their states in a format of `STATE_FORMATS`, for `unpack_states`."""
    if state_format == EXACT:
        return list(caches)
    return _replace_parts(caches, lambda part: StoredStates(part, state_format) if type(part) is ArraysCache else part)


def unpack_states(caches: Sequence[Any]) -> list[Any]:
    return _replace_parts(caches, lambda part: part.unpack() if isinstance(part, StoredStates) else part)


def states_of(caches: Sequence[Any]) -> list[Any]:
    """Return the parts of caches that hold states, in whichever format."""
    return [part for part in cache_parts(caches) if isinstance(part, (ArraysCache, StoredStates))]


def without_states(caches: Sequence[Any]) -> list[Any]:
    """Return the other parts of caches."""
    return [part for part in cache_parts(caches) if not isinstance(part, (ArraysCache, StoredStates))]


def replace_states(caches: Sequence[Any], states: Sequence[Any]) -> list[Any]:
    """Return caches with the parts that `states_of` returns replaced by `states`."""
    remaining = iter(states)
    return _replace_parts(caches, lambda x: next(remaining) if isinstance(x, (ArraysCache, StoredStates)) else x)


def _replace_parts(caches: Sequence[Any], replace: Callable[[Any], Any]) -> list[Any]:
    return [CacheList(*map(replace, x.caches)) if isinstance(x, CacheList) else replace(x) for x in caches]
