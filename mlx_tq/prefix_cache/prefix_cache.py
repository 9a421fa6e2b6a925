"""`PrefixCache`: a prompt continues from the longest prefix that it shares with an earlier one.

A checkpoint is the state of all layers after some tokens: at the end of a prefill step, of a prompt, of an answer. Its
key is a digest of these tokens and of all else that its bits depend on: the model, how its caches are stored, and what
computes. A prompt that shares all tokens of a checkpoint continues from exactly that state. A prompt that shares only
the first ones continues from their packed rows, at the end of a block of 32 tokens, with the state that the stored
caches would have if they were trimmed to that place. The shared tokens behind it, about a window, are prefilled again.
Recurrent states and sliding windows continue from whole checkpoints only.

States are large, and are stored on a grid of tokens (`StateStorage`) instead of after each step.
"""

import copy
import hashlib
import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import trim_prompt_cache

from mlx_tq import __version__
from mlx_tq.cache.packed_rows import BLOCK_ROWS
from mlx_tq.cache.recurrent_states import DEFAULT_STATES, EXACT, StateStorage, array_shapes
from mlx_tq.config import BLOCK
from mlx_tq.errors import CacheFormatError, is_out_of_memory
from mlx_tq.kernels import backend, thresholds
from mlx_tq.models import exact_fingerprint
from mlx_tq.prefix_cache.checkpoint import Checkpoint, decode_checkpoint
from mlx_tq.prefix_cache.folder import BLOCKS, CHECKPOINTS, Folder
from mlx_tq.prefix_cache.summary import Summary
from mlx_tq.prompt_cache.cache_file import refuse_damaged, try_out
from mlx_tq.prompt_cache.capacity import all_arrays
from mlx_tq.prompt_cache.compressed import check_caches
from mlx_tq.prompt_cache.layer_group import compressed_caches, layer_group_of
from mlx_tq.prompt_cache.memory import choose_state_storage, probe_states
from mlx_tq.prompt_cache.plan import Plan
from mlx_tq.prompt_cache.statistics import tokens_seen

FORMAT = 2  # of the records
_TRIMS = 2 * BLOCK  # more than the tokens by which a whole state is trimmed
_COMPARED_FIRST = 64  # tokens, among which most prompts differ


def derive_key(parent: str, content: bytes) -> str:
    """Return the key of `content` under the key `parent`: 64 hex digits."""
    digest = hashlib.sha256(parent.encode())
    digest.update(content)
    return digest.hexdigest()


def root_key(model: Any, plan: Plan, salt: str = "", state_format: str = EXACT) -> str:
    """Return the key from which all keys of a model, a plan and a format of states derive. Reads all weights."""
    versions = (FORMAT, __version__, version("mlx"), version("mlx-lm"))
    stored = (plan.config.to_dict(), [layer.spec.to_dict() for layer in plan.layers], plan.classes)
    parts = (exact_fingerprint(model), _environment(), versions, stored)
    key = derive_key(salt, json.dumps(parts, sort_keys=True).encode())
    if state_format != EXACT:
        key = derive_key(key, state_format.encode())
    for layer in plan.layers:
        for array in layer.queries.arrays() if layer.queries else ():
            key = derive_key(key, np.array(array.astype(mx.float32)).tobytes())
    return key


def _environment() -> list[str]:
    """Return what computes now. Another device or another split of work sums in another order."""
    device = mx.device_info().get("device_name")
    return [platform.machine(), str(mx.default_device()), str(device), backend.current(), thresholds.fingerprint()]


@dataclass(frozen=True, eq=False)
class RestoredCheckpoint:
    """A checkpoint from the disk. While somebody has it, prompts that restore it share its rows."""

    caches: list[Any]  # never prefilled into


class _State(NamedTuple):
    """The state of the first tokens of a checkpoint: of all, or of those whose rows are all packed."""

    key: str
    tokens: int


class _Place(NamedTuple):
    """A place where a prompt can continue: after `tokens` tokens, by a trim of `state`."""

    tokens: int
    state: _State
    is_whole: bool  # whether the state is the checkpoint's own

    @property
    def number(self) -> int:
        """A number that is larger for more tokens, and for a shorter trim of a whole state.

        Ranks that have equal ones continue from arrays of equal sizes.
        """
        return _TRIMS * self.tokens + (_TRIMS - 1 - (self.state.tokens - self.tokens) if self.is_whole else 0)


class ReusedPrefix(NamedTuple):
    """Tokens that were restored, and the seconds that took. `note(stop)` stores the tokens before `stop`, if due."""

    restored: int = 0
    seconds: float = 0.0
    note: Callable[[int], None] = lambda stop: None


@contextmanager
def reuse_prefix(prefix_cache: "PrefixCache | None", caches: list[Any], ids: list[int]) -> Iterator[ReusedPrefix]:
    """Replace empty caches, in their list, by those of the longest cached prefix, and store what is prefilled next.

    `ids` are the tokens that are prefilled: with mlx-lm all but the prompt's last one.
    """
    if prefix_cache is None:
        yield ReusedPrefix()
        return
    prompt = CachedPrompt(prefix_cache, ids)
    try:
        started = time.perf_counter()
        caches[:] = prompt.restore() or caches
        prompt.checkpoint = None  # these caches alone have the rows
        seconds = time.perf_counter() - started

        def note(stop: int) -> None:
            if stop >= len(ids) or prefix_cache.is_due(stop, prompt.last_checkpoint):
                prompt.store(ids[:stop], caches)

        yield ReusedPrefix(prompt.restored, seconds, note)
    finally:
        prompt.close()


class PrefixCache:
    """KV caches of prompt prefixes on disk, for one model, all of whose weights are read once, and one plan.

    Any process may use the same folder. Prefixes that include evicted tokens are not stored, and those that were stored
    with another `salt` never match. `warn` is called when prompts cannot be stored, once until they can be again.
    `states` says how recurrent states are stored, if there are any.
    """

    def __init__(
        self,
        model: Any,
        plan: Plan,
        folder: Folder,
        warn: Callable[[str], None],
        salt: str = "",
        states: StateStorage = DEFAULT_STATES,
    ) -> None:
        self.plan, self.folder, self._model, self._warn = plan, folder, model, warn
        self._states = choose_state_storage(model, states)
        self.state_format = EXACT if self._states is None else self._states.format
        self._state_shapes = array_shapes(probe_states(model))
        self.root, self._environment = root_key(model, plan, salt, self.state_format), _environment()
        self._has_failed = self._has_refused = False
        self.live: WeakValueDictionary[_State, RestoredCheckpoint] = WeakValueDictionary()

    @property
    def is_usable(self) -> bool:
        """Whether what computes is what it was; a kernel that fails on the way changes it."""
        return _environment() == self._environment

    def is_due(self, tokens: int, stored: int) -> bool:
        """Return whether to store an unfinished prompt after `tokens` tokens, if it was last stored after `stored`."""
        return self._states is None or self._states.is_due(tokens, stored)

    def summaries(self) -> dict[str, Summary]:
        """Return the checkpoints under this root, by their keys."""
        return {key: summary for key, summary in self.folder.checkpoints().items() if summary.root == self.root}

    def place(self, key: str, summary: Summary, shared: int, limit: int) -> _Place | None:
        """Return where a prompt can continue whose first `shared` tokens are those of a checkpoint.

        The place's number is at most `limit`.
        """
        held = len(summary.tokens)
        for tokens in (min(shared, limit // _TRIMS), min(shared, limit // _TRIMS - 1)):
            place = _Place(tokens, _State(key, held), is_whole=True)
            if tokens > 0 and held - tokens <= summary.slack and place.number <= limit:
                return place
        if not summary.has_prefixes:
            return None
        sizes = [layer.spec for layer in self.plan.layers]
        tokens = min([limit // _TRIMS // BLOCK * BLOCK, *(spec.packed_until(shared) for spec in sizes)])
        is_packed = tokens > max((spec.sinks for spec in sizes), default=0)
        return _Place(tokens, _State(key, tokens), is_whole=False) if is_packed else None

    def check(self, caches: list[Any], tokens: int) -> None:
        """Raise CacheFormatError, or the error of a trial pass, unless restored caches match the plan and `tokens`."""
        check_caches(self._model, caches)
        layers = compressed_caches(caches)
        if [layer.spec for layer in layers] != [layer.spec for layer in self.plan.layers]:
            raise CacheFormatError("its layers are stored in other formats than those of the plan")
        if array_shapes(caches) != self._state_shapes:  # those of fewer heads could be broadcast to all
            raise CacheFormatError("its recurrent states have other shapes than the model's")
        if any(layer.offset != tokens for layer in layers):
            raise CacheFormatError(f"it holds {layers[0].offset} tokens, not {tokens}")
        finite = [mx.isfinite(array).all() for array in all_arrays(caches) if mx.issubdtype(array.dtype, mx.floating)]
        if not all(is_finite.item() for is_finite in finite):
            raise CacheFormatError("it has values that are NaN or infinite")
        try_out(caches, self._model)

    def report_write(self, error: OSError | None) -> None:
        """Warn of the first write that fails."""
        if error is not None and not self._has_failed:
            self._warn_unstored(str(error.strerror))
        self._has_failed = error is not None
        self._has_refused &= error is not None

    def report_refusal(self, fault: str) -> None:
        """Warn of the first prompt that may not be stored."""
        if not self._has_refused:
            self._warn_unstored(fault)
        self._has_refused = True

    def _warn_unstored(self, fault: str) -> None:
        self._warn(
            f"prompts cannot be stored in {self.folder.path} ({fault}), so they will be prefilled again. The "
            "conversation continues."
        )


class CachedPrompt:
    """The checkpoints of a sequence, which begins with the prompt `ids`; the first `num_stored` need not be stored."""

    def __init__(self, prefix_cache: PrefixCache, ids: Sequence[int], num_stored: int = 0) -> None:
        self._cache, self._folder, self._ranks = prefix_cache, prefix_cache.folder, prefix_cache.plan.ranks
        self._ids = np.array(ids, np.int32)
        self._block_keys: tuple[str, ...] = ()  # of the stored blocks
        self._used: list[str] = []  # keys of the checkpoints restored and stored
        self._has_failed = False  # the disk may be full: the next prompt tries again
        self._is_refused = False  # it takes more than the folder may hold, or than may be written now
        self._damaged: set[str] = set()  # keys of checkpoints; their blocks are unknown, and may be damaged too
        self._place: _Place | None = None  # that `find` found
        self.restored = 0  # tokens
        self.last_checkpoint = num_stored  # tokens before the last one that was restored or stored
        self.checkpoint: RestoredCheckpoint | None = None

    def find(self, *, alone: bool = False) -> int:
        """Return after how many tokens the prompt can continue: on this rank `alone`, or on all, which then search."""
        summaries = self._cache.summaries() if self._cache.is_usable else {}
        shared = [
            (key, summary, common_prefix(summary.tokens, self._ids))
            for key, summary in summaries.items()
            if key not in self._damaged
        ]

        def find_last(limit: int) -> int:
            places = (self._cache.place(key, summary, count, limit) for key, summary, count in shared)
            self._place = max(filter(None, places), key=lambda place: place.number, default=None)
            return 0 if self._place is None else self._place.number

        limit = _TRIMS * (len(self._ids) + 1)
        number = find_last(limit) if alone else self._ranks.largest_common(find_last, limit)
        return number // _TRIMS

    @property
    def live_caches(self) -> list[Any] | None:
        """The caches that `restore` would copy, or None if it would read them from the disk."""
        checkpoint = None if self._place is None else self._cache.live.get(self._place.state)
        return None if checkpoint is None else checkpoint.caches

    def restore(self) -> list[Any] | None:
        """Return caches of the longest prefix that all ranks can use, or None if there is none."""
        if self._place is None:
            self.find()
        while (place := self._place) is not None:
            stop = place.tokens
            checkpoint = self._cache.live.get(place.state) or self._read(place, stop)
            (is_damaged,) = self._ranks.any([checkpoint is None])
            if checkpoint is not None and not is_damaged:
                self._cache.live[place.state] = self.checkpoint = checkpoint
                self._folder.touch(place.state.key)
                self._used = [place.state.key]
                self.restored = self.last_checkpoint = stop
                caches = copy.deepcopy(checkpoint.caches)
                trim_prompt_cache(caches, place.state.tokens - stop)
                self._block_keys = _block_keys(caches)
                return caches
            if checkpoint is None:
                self._damaged.add(place.state.key)
            self.find()
        return None

    def _read(self, place: "_Place", stop: int) -> RestoredCheckpoint | None:
        key, held = place.state
        data = self._folder.read(key)
        if data is None:
            return None
        try:
            caches, summary = decode_checkpoint(data, self._folder.read_block, None if place.is_whole else held)
            with refuse_damaged(key):
                if summary.root != self._cache.root or not np.array_equal(summary.tokens[:stop], self._ids[:stop]):
                    raise CacheFormatError("it is of other tokens")
                self._cache.check(caches, held)
            sequence = layer_group_of(caches)
            if sequence is not None:
                sequence.ranks = self._ranks  # which no file has
                sequence.set_ropes(layer.rope for layer in self._cache.plan.layers)
        except CacheFormatError:
            self._folder.remove(CHECKPOINTS, key)
            return None
        except Exception as error:
            if is_out_of_memory(error):  # which says nothing of the checkpoint
                return None
            raise
        _set_block_keys(caches, summary.block_keys)
        return RestoredCheckpoint(caches)

    def can_store(self, stop: int) -> bool:
        """Return whether the first `stop` tokens are more than those stored, and may be stored."""
        is_refused = self._has_failed or self._is_refused
        return stop > self.last_checkpoint and not is_refused and self._cache.is_usable

    def store(self, tokens: Sequence[int], caches: list[Any]) -> None:
        """Store caches of exactly these tokens, if nothing was evicted or recalled."""
        if not self.can_store(len(tokens)) or tokens_seen(caches) != len(tokens):
            return
        sequence = layer_group_of(caches)
        if sequence is not None and (sequence.stats.rounds or sequence.archived or sequence.pinned):
            return
        self._block_keys = max(self._block_keys, _block_keys(caches), key=len)
        try:
            with self._folder.writing() as may_write:
                if may_write:
                    self._write(Checkpoint(caches, tokens, self._cache.state_format))
        except OSError as error:
            self._has_failed = True
            self._cache.report_write(error)
        self.mark(caches)

    def _write(self, checkpoint: Checkpoint) -> None:
        root, count, numbers = self._cache.root, len(checkpoint.tokens), range(checkpoint.num_blocks)
        keys = dict(zip(numbers, self._block_keys, strict=False))
        keys = {number: key for number, key in keys.items() if self._folder.has(BLOCKS, key)}
        nbytes = checkpoint.nbytes - len(keys) * checkpoint.block_nbytes
        if (fault := self._fault(count, checkpoint.nbytes, nbytes)) is not None:
            self._is_refused = True
            self._cache.report_refusal(fault)
            return
        self._folder.make_room(nbytes, keys.values())
        key = derive_key(root, checkpoint.tokens.tobytes())
        # A checkpoint that is there already was not found: its beginning is damaged, and blocks may be.
        verify = bool(self._damaged) or self._folder.has(CHECKPOINTS, key)
        for number in sorted({*numbers} - keys.keys()):
            block = checkpoint.block(number)
            # Under the root, so that the time to store tells nothing of what prompts with another salt have stored.
            keys[number] = derive_key(root, block)
            self._folder.write(BLOCKS, keys[number], block, verify=verify)
        self._block_keys, self.last_checkpoint = tuple(keys[number] for number in numbers), count
        self._folder.write(CHECKPOINTS, key, checkpoint.record(root, self._block_keys), verify=verify)
        self._used.append(key)
        self._cache.report_write(None)

    def _fault(self, count: int, nbytes: int, new_nbytes: int) -> str | None:
        """Return why `count` tokens of `nbytes` bytes, of which `new_nbytes` are to be written, cannot be stored."""
        if nbytes > self._folder.limit:  # its parts would remove each other
            limit = self._folder.limit / 1e6
            return f"{count:,} tokens take {nbytes / 1e6:,.1f} MB, more than the limit, {limit:,.1f} MB"
        if not self._folder.may_write(new_nbytes):
            return f"{self._folder.hourly_limit / 2**30:,.0f} GiB were written in an hour, which is the limit"
        return None

    def mark(self, caches: list[Any]) -> None:
        """Note in copies of this sequence's caches which blocks are stored, for prompts that continue from them."""
        _set_block_keys(caches, max(self._block_keys, _block_keys(caches), key=len))

    def close(self) -> None:
        """Wait for the disk."""
        for key in self._used:
            self._folder.touch(key)
        if self._used and not self._has_failed:
            self._folder.sync(self._used[-1])


def _block_keys(caches: list[Any]) -> tuple[str, ...]:
    """Return the keys of the stored blocks, which the first layer of those that have any knows."""
    return next((layer.block_keys for layer in compressed_caches(caches) if layer.growing_state), ())


def _set_block_keys(caches: list[Any], keys: tuple[str, ...]) -> None:
    for layer in compressed_caches(caches):
        if layer.growing_state and not layer.regions.evicted:
            layer.block_keys = keys[: layer.packed_tokens // BLOCK_ROWS]
            return


def common_prefix(ids: np.ndarray, others: np.ndarray) -> int:
    """Return the number of first tokens that are equal."""
    count = min(len(ids), len(others))
    if count > _COMPARED_FIRST and (ids[:_COMPARED_FIRST] != others[:_COMPARED_FIRST]).any():
        count = _COMPARED_FIRST
    differ = ids[:count] != others[:count]
    return int(differ.argmax()) if differ.any() else count
