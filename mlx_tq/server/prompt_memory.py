"""`PromptMemory`: prompts whose caches stay in memory, up to a limit of bytes, of which shared rows count once."""

import copy
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache

from mlx_tq.cache.recurrent_states import EXACT, pack_states, unpack_states
from mlx_tq.errors import CacheFormatError
from mlx_tq.prefix_cache.prefix_cache import common_prefix
from mlx_tq.prompt_cache.capacity import all_arrays, release_capacity
from mlx_tq.prompt_cache.layer_group import compressed_caches

log = logging.getLogger(__name__)

_HALF_LIFE = 64  # uses of other prompts after which a prompt is worth half
_SHOWN = 10  # tokens that are logged before and after the place where a prompt diverges


@dataclass(eq=False)
class _Stored:
    ids: np.ndarray
    caches: list[Any]
    arrays: dict[int, mx.array]  # by their ids
    last_use: int


def copy_prefix(caches: list[Any], count: int, length: int) -> list[Any] | None:
    """Return a copy of the first `count` tokens of caches that hold `length`; None if they cannot be cut to them."""
    if count == 0 or (count < length and not can_trim_prompt_cache(caches)):
        return None
    copied = copy.deepcopy(caches)
    try:
        trim_prompt_cache(copied, length - count)
    except CacheFormatError:  # the prefix lost tokens that are not archived
        return None
    return copied


def has_evicted(caches: list[Any]) -> bool:
    return any(layer.regions.evicted for layer in compressed_caches(caches))


class PromptMemory:
    """Finds the caches of the longest stored prefix.

    Beyond `limit` bytes, prompts are removed by worth: their tokens, and how recently they were used. `decode` turns
    token ids into text for the log. Recurrent states are stored in one of the `STATE_FORMATS`.
    """

    def __init__(self, limit: int, decode: Callable[[list[int]], str] = str, state_format: str = EXACT) -> None:
        self._limit, self._decode, self._state_format = limit, decode, state_format
        self._prompts: list[_Stored] = []
        self._holders: Counter[int] = Counter()  # prompts that hold an array, by its id
        self._uses = 0
        self.nbytes = 0  # arrays that several prompts share count once

    def __len__(self) -> int:
        return len(self._prompts)

    def insert(self, ids: Sequence[int], caches: list[Any]) -> None:
        """Store caches that hold `ids`, and belong to this memory from now on."""
        caches = pack_states(caches, self._state_format)
        release_capacity(caches)
        tokens = np.array(ids, np.int64)
        is_trimmable = can_trim_prompt_cache(caches) and not has_evicted(caches)
        for other in self._prompts[:]:
            common = common_prefix(other.ids, tokens)
            if common == len(other.ids) and (is_trimmable or common == len(tokens)):  # which these caches can become
                self._remove(other)
        arrays = {id(array): array for array in all_arrays(caches)}
        self.nbytes += sum(array.nbytes for key, array in arrays.items() if not self._holders[key])
        self._holders.update(arrays.keys())
        self._prompts.append(_Stored(tokens, caches, arrays, self._next_use()))
        self.trim_to(self._limit)

    def find(self, ids: Sequence[int], most: int, *, notes_use: bool = True) -> tuple[list[Any] | None, int]:
        """Return a copy of the caches that hold the longest prefix of `ids`, at most `most` tokens, and its length.

        Without `notes_use`, nothing changes, and nothing is logged.
        """
        tokens = np.array(ids, np.int64)
        lengths = [(common_prefix(stored.ids, tokens), stored) for stored in self._prompts]
        lengths = [(length, stored) for length, stored in lengths if length]
        lengths.sort(key=lambda pair: (-min(pair[0], most), len(pair[1].ids)))
        if lengths and notes_use:
            self._log_divergence(tokens, *lengths[0])
        for length, stored in lengths:
            count = min(length, most)
            caches = copy_prefix(stored.caches, count, len(stored.ids))
            if caches is None:
                continue
            if notes_use:
                stored.last_use = self._next_use()
            return unpack_states(caches), count
        return None, 0

    def longest(self, ids: Sequence[int], most: int) -> int:
        """Return how many tokens `find` would find, unless some of them were evicted; any thread may ask."""
        tokens = np.array(ids, np.int64)
        counts = [(min(common_prefix(stored.ids, tokens), most), stored) for stored in self._prompts[:]]
        return max((n for n, x in counts if n == len(x.ids) or can_trim_prompt_cache(x.caches)), default=0)

    def trim_to(self, nbytes: int) -> None:
        """Remove the prompts of the least worth until all take at most `nbytes`."""
        while self._prompts and self.nbytes > nbytes:
            self._remove(min(self._prompts, key=self._worth))

    def _worth(self, stored: _Stored) -> float:
        """Return the logarithm of what it is worth."""
        return math.log2(len(stored.ids)) - (self._uses - stored.last_use) / _HALF_LIFE

    def _next_use(self) -> int:
        self._uses += 1
        return self._uses

    def _remove(self, stored: _Stored) -> None:
        self._prompts.remove(stored)
        self._holders.subtract(stored.arrays.keys())
        for key, array in stored.arrays.items():
            if not self._holders[key]:
                del self._holders[key]
                self.nbytes -= array.nbytes

    def _log_divergence(self, tokens: np.ndarray, common: int, closest: _Stored) -> None:
        if common < min(len(tokens), len(closest.ids)) and log.isEnabledFor(logging.DEBUG):
            place = slice(max(0, common - _SHOWN), common + _SHOWN)
            texts = (self._decode(ids[place].tolist()) for ids in (tokens, closest.ids))
            log.debug("a prompt diverges from the closest stored one after %d tokens: %r, not %r", common, *texts)
