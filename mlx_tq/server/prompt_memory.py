"""`PromptMemory`: prompts whose caches stay in memory, up to a limit of bytes, of which shared rows count once.

A prompt that extends a stored one replaces it. Of recurrent states, which cannot be trimmed, it keeps those of the
prompts that it replaces:

    stored before    keys and values 0 ... 2048    states after 2048
    inserted         keys and values 0 ... 4096    states after 4096
    stored then      keys and values 0 ... 4096    states after 2048 and 4096
"""

import copy
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import trim_prompt_cache

from mlx_tq.cache.layer import can_trim
from mlx_tq.cache.recurrent_states import EXACT, pack_states, replace_states, states_of, unpack_states, without_states
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
    last_use: int
    states: dict[int, list[Any]] = field(default_factory=dict)  # of shorter prefixes, by their lengths
    arrays: dict[int, mx.array] = field(default_factory=dict)  # of caches and states, by their ids

    @property
    def is_trimmable(self) -> bool:
        """Whether the prompt can be cut to any of its tokens."""
        return can_trim(self.caches) and not has_evicted(self.caches)

    @property
    def keeps_states(self) -> bool:
        """Whether the prompt can be cut to tokens whose states are stored, and to no others."""
        is_trimmable = can_trim(self.caches)
        return not is_trimmable and can_trim(without_states(self.caches)) and not has_evicted(self.caches)

    def reachable(self, most: int) -> int:
        """Return to how many tokens, `most` at most, the caches can be cut."""
        if most == len(self.ids) or can_trim(self.caches):
            return most
        return max((length for length in [*self.states] if length <= most), default=0)

    def copy_first(self, count: int) -> list[Any] | None:
        """Return a copy of the first `count` tokens, which are `reachable`; None if evicted tokens prevent it."""
        if count not in self.states:
            return copy_prefix(self.caches, count, len(self.ids))
        copied = copy.deepcopy(replace_states(self.caches, self.states[count]))
        trim_prompt_cache(without_states(copied), len(self.ids) - count)
        return copied


def copy_prefix(caches: list[Any], count: int, length: int) -> list[Any] | None:
    """Return a copy of the first `count` tokens of caches that hold `length`; None if they cannot be cut to them."""
    if count == 0 or (count < length and not can_trim(caches)):
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
        new = _Stored(tokens, caches, self._next_use())
        for other in self._prompts[:]:
            common, extends_states = common_prefix(other.ids, tokens), new.keeps_states and other.keeps_states
            is_replaced = common == len(tokens) and not other.is_trimmable
            if common < len(other.ids) or not (new.is_trimmable or extends_states or is_replaced):
                continue
            self._remove(other)  # which these caches can become
            if extends_states:
                new.states |= other.states
                new.states |= {common: states_of(other.caches)} if common < len(tokens) else {}
        arrays = [*all_arrays(caches), *(array for states in new.states.values() for array in all_arrays(states))]
        new.arrays = {id(array): array for array in arrays}
        self.nbytes += sum(array.nbytes for key, array in new.arrays.items() if not self._holders[key])
        self._holders.update(new.arrays.keys())
        self._prompts.append(new)
        self.trim_to(self._limit)

    def find(self, ids: Sequence[int], most: int, *, notes_use: bool = True) -> tuple[list[Any] | None, int]:
        """Return a copy of the caches that hold the longest prefix of `ids`, at most `most` tokens, and its length.

        Without `notes_use`, nothing changes, and nothing is logged.
        """
        tokens = np.array(ids, np.int64)
        commons = [(common_prefix(stored.ids, tokens), stored) for stored in self._prompts]
        commons = [(common, stored) for common, stored in commons if common]
        if commons and notes_use:
            closest = max(commons, key=lambda pair: (min(pair[0], most), -len(pair[1].ids)))
            self._log_divergence(tokens, *closest)
        counts = [(stored.reachable(min(common, most)), stored) for common, stored in commons]
        for count, stored in sorted(counts, key=lambda pair: (-pair[0], len(pair[1].ids))):
            caches = stored.copy_first(count)
            if caches is None:
                continue
            if notes_use:
                stored.last_use = self._next_use()
            return unpack_states(caches), count
        return None, 0

    def longest(self, ids: Sequence[int], most: int) -> int:
        """Return how many tokens `find` would find, unless some of them were evicted; any thread may ask."""
        tokens = np.array(ids, np.int64)
        return max((x.reachable(min(common_prefix(x.ids, tokens), most)) for x in self._prompts[:]), default=0)

    def trim_to(self, nbytes: int) -> None:
        """Remove the prompts of the least worth, their earlier states first, until all take at most `nbytes`."""
        while self._prompts and self.nbytes > nbytes:
            least = min(self._prompts, key=self._worth)
            if not least.states:
                self._remove(least)
                continue
            oldest = all_arrays(least.states.pop(min(least.states)))
            self._release({key: least.arrays.pop(key) for key in map(id, oldest) if key in least.arrays})

    def _worth(self, stored: _Stored) -> float:
        """Return the logarithm of what it is worth."""
        return math.log2(len(stored.ids)) - (self._uses - stored.last_use) / _HALF_LIFE

    def _next_use(self) -> int:
        self._uses += 1
        return self._uses

    def _remove(self, stored: _Stored) -> None:
        self._prompts.remove(stored)
        self._release(stored.arrays)

    def _release(self, arrays: dict[int, mx.array]) -> None:
        self._holders.subtract(arrays.keys())
        for key, array in arrays.items():
            if not self._holders[key]:
                del self._holders[key]
                self.nbytes -= array.nbytes

    def _log_divergence(self, tokens: np.ndarray, common: int, closest: _Stored) -> None:
        if common < min(len(tokens), len(closest.ids)) and log.isEnabledFor(logging.DEBUG):
            place = slice(max(0, common - _SHOWN), common + _SHOWN)
            texts = (self._decode(ids[place].tolist()) for ids in (tokens, closest.ids))
            log.debug("a prompt diverges from the closest stored one after %d tokens: %r, not %r", common, *texts)
