"""`PrefixCache`: a prompt continues from the longest prefix that was prefilled before, bit for bit as if prefilled now.

A checkpoint is the state of all layers at the end of a prefill step. Its key is a digest of all that its bits depend
on: the model, how its caches are stored, what computes, and the steps so far. The same tokens in other steps have
another key, as what a step sees unpacked depends on where it begins.

It is written as records: blocks of ROWS packed tokens of all layers, which the checkpoints of a prompt share, and one
record with the rest of the state and the block keys. A layer with two key formats stays in that record.
"""

import copy
import hashlib
import io
import json
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import CacheList

from mlx_tq import __version__
from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.errors import CacheFormatError
from mlx_tq.kernels import backend, thresholds
from mlx_tq.models import exact_fingerprint
from mlx_tq.prefix_cache.folder import BLOCKS, CHECKPOINTS, Folder
from mlx_tq.prompt_cache.cache_file import CacheState, join_caches, refuse_damaged, split_caches, try_out
from mlx_tq.prompt_cache.capacity import all_arrays, with_trimmed_windows
from mlx_tq.prompt_cache.compressed import check_caches
from mlx_tq.prompt_cache.layer_group import compressed_caches, layer_group_of
from mlx_tq.prompt_cache.plan import Plan
from mlx_tq.prompt_cache.statistics import tokens_seen

FORMAT = 1  # of the records
_SHARED_BY = 4  # continuations that protect a checkpoint; with fewer, much is kept that is never requested again
_MAX_REMEMBERED = 100_000  # checkpoints whose continuations are counted
ROWS = 256  # packed tokens of a block


class Checkpoint:
    """The state of caches from which nothing was evicted. The caches may go on; the checkpoint stays."""

    def __init__(self, caches: list[Any]) -> None:
        self._parts, self._tokens = split_caches([with_trimmed_windows(cache) for cache in caches]), tokens_seen(caches)
        layers: dict[str, Any] = {}  # by their paths in the states of all caches
        for index, cache in enumerate(caches):
            if isinstance(cache, CacheList):
                layers |= {f"{index}.{place}.0": part for place, part in enumerate(cache.caches)}
            else:
                layers[str(index)] = cache
        self._growing = {  # the arrays that grow along axis 2, and the tokens of an entry
            array: tokens
            for path, cache in layers.items()
            if isinstance(cache, CompressedKVCache) and cache.packed_tokens
            for name, tokens in cache.growing_state.items()
            if (array := f"{path}.{name}") in self._parts.arrays
        }

    def encode_blocks(self, start: int) -> list[bytes]:
        """Return the full blocks from number `start` on."""
        lengths = [self._parts.arrays[name].shape[2] * tokens for name, tokens in self._growing.items()]
        count = min(lengths, default=0) // ROWS
        return [_to_bytes(self._slices(number * ROWS, (number + 1) * ROWS), {}) for number in range(start, count)]

    def _slices(self, start: int, stop: int | None = None) -> dict[str, mx.array]:
        return {
            name: self._parts.arrays[name][:, :, start // tokens : stop and stop // tokens]
            for name, tokens in self._growing.items()
        }

    def encode(self, block_keys: list[str]) -> bytes:
        """Return the checkpoint's own record: all but the first blocks, whose keys are given."""
        header = {"classes": self._parts.classes, "scalars": self._parts.scalars, "growing": list(self._growing)}
        arrays = self._parts.arrays | self._slices(len(block_keys) * ROWS)
        return _to_bytes(arrays, header | {"blocks": block_keys, "tokens": self._tokens})


def decode_checkpoint(data: bytes, read_block: Callable[[str], bytes | None]) -> tuple[list[Any], list[str]]:
    """Return the caches of a checkpoint and its block keys; raise CacheFormatError if a part is damaged or missing."""
    try:
        arrays, header = _from_bytes(data)
        contents = [read_block(key) for key in header["blocks"]]  # reading removes damaged ones: all
        blocks = [_from_bytes(content or b"")[0] for content in contents]
        for name in header["growing"] if blocks else ():
            arrays[name] = mx.concatenate([*(block[name] for block in blocks), arrays[name]], axis=2)
        return join_caches(CacheState(header["classes"], header["scalars"], arrays)), header["blocks"]
    except Exception as error:
        raise CacheFormatError(f"a checkpoint is incomplete ({error!r}). Its tokens are prefilled again.") from error


def describe_checkpoint(data: bytes) -> dict[str, int]:
    """Return how many tokens and blocks the record of a checkpoint has; raise CacheFormatError if it is damaged."""
    try:
        _, header = _from_bytes(data)
        return {"tokens": int(header["tokens"]), "blocks": len(header["blocks"])}
    except Exception as error:
        raise CacheFormatError(f"a checkpoint is damaged ({error!r}). Run mlx_tq.store clear.") from error


def _to_bytes(arrays: dict[str, mx.array], header: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    mx.save_safetensors(file, arrays, {"header": json.dumps(header)})
    return file.getvalue()


def _from_bytes(data: bytes) -> tuple[dict[str, mx.array], dict[str, Any]]:
    arrays: Any
    metadata: Any
    arrays, metadata = mx.load(io.BytesIO(data), format="safetensors", return_metadata=True)
    return arrays, json.loads(metadata["header"])


def derive_key(parent: str, content: bytes) -> str:
    """Return the key of `content` under the key `parent`: 64 hex digits."""
    digest = hashlib.sha256(parent.encode())
    digest.update(content)
    return digest.hexdigest()


def root_key(model: Any, plan: Plan, salt: str = "") -> str:
    """Return the key from which all keys of a model and plan derive. Reads all weights."""
    versions = (FORMAT, __version__, version("mlx"), version("mlx-lm"))
    stored = (plan.config.to_dict(), [layer.spec.to_dict() for layer in plan.layers], plan.classes)
    parts = (exact_fingerprint(model), _environment(), versions, stored)
    key = derive_key(salt, json.dumps(parts, sort_keys=True).encode())
    for layer in plan.layers:
        for array in layer.queries.arrays() if layer.queries else ():
            key = derive_key(key, np.array(array.astype(mx.float32)).tobytes())
    return key


def _environment() -> list[str]:
    """Return what computes now. Another device or another split of work sums in another order."""
    device = mx.device_info().get("device_name")
    return [platform.machine(), str(mx.default_device()), str(device), backend.current(), thresholds.fingerprint()]


def step_keys(root: str, segments: list[list[int]], step: int) -> dict[int, str]:
    """Return the key of each prefill step by the number of tokens before its end; each segment begins a step."""
    keys, key, stop = {}, root, 0
    for ids in segments:
        for start in range(0, len(ids), step):
            tokens = np.array(ids[start : start + step], "<i8")
            stop += len(tokens)
            keys[stop] = key = derive_key(key, tokens.tobytes())
    return keys


@dataclass(frozen=True, eq=False)
class RestoredCheckpoint:
    """A checkpoint from the disk. While somebody has it, prompts that restore it share its rows."""

    caches: list[Any]  # never prefilled into
    block_keys: list[str]


class ReusedPrefix(NamedTuple):
    """Tokens that were restored, and the seconds that took. `note(stop)` stores the tokens before `stop`, if due."""

    restored: int = 0
    seconds: float = 0.0
    note: Callable[[int], None] = lambda stop: None


@contextmanager
def reuse_prefix(
    prefix_cache: "PrefixCache | None", caches: list[Any], ids: list[int], step: int
) -> Iterator[ReusedPrefix]:
    """Replace empty caches, in their list, by those of the longest cached prefix, and store what is prefilled next.

    `ids` are the tokens that are prefilled in steps of `step`: with mlx-lm all but the prompt's last one.
    """
    if prefix_cache is None:
        yield ReusedPrefix()
        return
    prompt = prefix_cache.prompt([ids], step)
    try:
        started = time.perf_counter()
        caches[:] = prompt.restore() or caches
        prompt.checkpoint = None  # these caches alone have the rows
        yield ReusedPrefix(prompt.restored, time.perf_counter() - started, lambda stop: prompt.store(stop, caches))
    finally:
        prompt.close()


class PrefixCache:
    """KV caches of prompt prefixes on disk, for one model, all of whose weights are read once, and one plan.

    Any process may use the same folder. Prefixes that include evicted tokens are not stored, and those that were stored
    with another `salt` never match. `warn` is called when prompts cannot be stored, once until they can be again.
    """

    def __init__(self, model: Any, plan: Plan, folder: Folder, warn: Callable[[str], None], salt: str = "") -> None:
        self.plan, self.folder, self._model, self._warn = plan, folder, model, warn
        self.root, self._environment = root_key(model, plan, salt), _environment()
        self._has_failed = self._has_seen_large = False
        self.live: WeakValueDictionary[str, RestoredCheckpoint] = WeakValueDictionary()
        self.continuations: dict[str, set[str]] = {}  # the next steps of prompts, by the key of a checkpoint

    def prompt(self, segments: list[list[int]], step: int, system: int = 0) -> "CachedPrompt":
        """Return a prompt whose segments are prefilled in steps of `step` tokens; the first `system` are shared."""
        return CachedPrompt(self, step_keys(self.root, segments, step), step, system)

    @property
    def is_usable(self) -> bool:
        """Whether what computes is what it was; a kernel that fails on the way changes it."""
        return _environment() == self._environment

    def check(self, caches: list[Any], tokens: int) -> None:
        """Raise CacheFormatError, or the error of a trial pass, unless restored caches match the plan and `tokens`."""
        check_caches(self._model, caches)
        layers = compressed_caches(caches)
        if [layer.spec for layer in layers] != [layer.spec for layer in self.plan.layers]:
            raise CacheFormatError("its layers are stored in other formats than those of the plan")
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

    def report_too_large(self, fault: str) -> None:
        """Warn of the first prompt that takes more than the folder may hold."""
        if not self._has_seen_large:
            self._warn_unstored(fault)
        self._has_seen_large = True

    def _warn_unstored(self, fault: str) -> None:
        self._warn(
            f"prompts cannot be stored in {self.folder.path} ({fault}), so they will be prefilled again. The "
            "conversation continues."
        )


class CachedPrompt:
    """The checkpoints of one prompt."""

    def __init__(self, prefix_cache: PrefixCache, keys: dict[int, str], step: int, system: int) -> None:
        self._cache, self._folder, self._ranks = prefix_cache, prefix_cache.folder, prefix_cache.plan.ranks
        self.keys = keys  # of the steps, by the tokens before their ends
        # The last step may be shorter; a conversation continues with a longer one there.
        steps = pairwise(keys.items())
        self._next_keys = {stop: key for (stop, _), (next_stop, key) in steps if next_stop - stop == step}
        self._block_keys: list[str] = []  # of the stored blocks
        self._checkpoint_keys: list[str] = []  # of the checkpoints restored and stored
        self._shared = system  # tokens that other prompts share
        self._limit = max(keys, default=0)  # checkpoints of more tokens are unusable, on some rank
        self._has_failed = False  # the disk may be full: the next prompt tries again
        self._is_too_large = False  # for the folder
        self._met_damage = False  # the blocks of a damaged checkpoint are unknown, and may be damaged too
        self.cached_tokens = 0  # that `find` found
        self.restored = 0  # tokens
        self.last_checkpoint = 0  # tokens before the last one that was restored or stored
        self.checkpoint: RestoredCheckpoint | None = None

    def find(self, *, alone: bool = False) -> int:
        """Return the tokens before the last checkpoint on this rank `alone`, or on all, which search together."""

        def find_last(limit: int) -> int:
            keys = self.keys if self._cache.is_usable else {}
            stops = (stop for stop in reversed(keys) if stop <= limit)
            live = self._cache.live
            return next((stop for stop in stops if keys[stop] in live or self._folder.has(CHECKPOINTS, keys[stop])), 0)

        self.cached_tokens = find_last(self._limit) if alone else self._ranks.largest_common(find_last, self._limit)
        return self.cached_tokens

    @property
    def live_caches(self) -> list[Any] | None:
        """The caches that `restore` would copy, or None if it would read them from the disk."""
        checkpoint = self._cache.live.get(self.keys.get(self.cached_tokens, ""))
        return None if checkpoint is None else checkpoint.caches

    def restore(self) -> list[Any] | None:
        """Return caches of the last checkpoint that all ranks can use, or None if there is none."""
        while stop := self.find():
            key = self.keys[stop]
            checkpoint = self._cache.live.get(key) or self._read(key, stop)
            (is_damaged,) = self._ranks.any([checkpoint is None])
            if checkpoint is not None and not is_damaged:
                self._cache.live[key] = self.checkpoint = checkpoint
                self._block_keys, self._checkpoint_keys = list(checkpoint.block_keys), [key]
                self.restored = stop
                self._note_checkpoint(stop)
                return copy.deepcopy(checkpoint.caches)
            self._limit, self._met_damage = stop - 1, True
        return None

    def _read(self, key: str, stop: int) -> RestoredCheckpoint | None:
        data = self._folder.read(CHECKPOINTS, key)
        if data is None:
            return None
        try:
            caches, block_keys = decode_checkpoint(data, partial(self._folder.read, BLOCKS))
            with refuse_damaged(key):
                self._cache.check(caches, stop)
            sequence = layer_group_of(caches)
            if sequence is not None:
                sequence.ranks = self._ranks  # which no file has
                sequence.set_ropes(layer.rope for layer in self._cache.plan.layers)
        except CacheFormatError:
            self._folder.remove(CHECKPOINTS, key)
            return None
        return RestoredCheckpoint(caches, block_keys)

    def follow(self, other: "CachedPrompt", stop: int) -> bool:
        """Continue after the first `stop` tokens of another prompt, if it prefilled them in the steps of this one."""
        if stop not in self.keys or self.keys[stop] != other.keys.get(stop):
            return False
        self._block_keys, self._checkpoint_keys = list(other._block_keys), other._checkpoint_keys[-1:]
        self._note_checkpoint(other.last_checkpoint)
        return True

    def can_store(self, stop: int) -> bool:
        """Return whether a step ends after `stop` tokens that is not stored yet."""
        is_new = stop in self.keys and stop > self.last_checkpoint
        return is_new and not (self._has_failed or self._is_too_large) and self._cache.is_usable

    def store(self, stop: int, caches: list[Any]) -> None:
        """Store caches of exactly the first `stop` tokens if a step ends there and nothing was evicted or recalled."""
        if not self.can_store(stop) or tokens_seen(caches) != stop:
            return
        sequence = layer_group_of(caches)
        if sequence is not None and (sequence.stats.rounds or sequence.archived or sequence.pinned):
            return
        try:
            with self._folder.writing() as may_write:
                if may_write:
                    self._write(stop, Checkpoint(caches))
        except OSError as error:
            self._has_failed = True
            self._cache.report_write(error)

    def _write(self, stop: int, checkpoint: Checkpoint) -> None:
        blocks = checkpoint.encode_blocks(len(self._block_keys))
        # Under the root, so that the time to store tells nothing of what prompts with another salt have stored.
        block_keys = [derive_key(self._cache.root, data) for data in blocks]
        record = checkpoint.encode([*self._block_keys, *block_keys])
        nbytes = sum(map(len, (*blocks, record))) + sum(self._folder.nbytes(BLOCKS, key) for key in self._block_keys)
        if nbytes > self._folder.limit:  # whose parts would evict each other
            self._is_too_large = True
            fault = (
                f"{stop:,} tokens take {nbytes / 1e6:,.1f} MB, more than the limit, {self._folder.limit / 1e6:,.1f} MB"
            )
            self._cache.report_too_large(fault)
            return
        for key, data in zip(block_keys, blocks, strict=True):
            self._folder.write(BLOCKS, key, data, verify=self._met_damage)
        self._folder.write(CHECKPOINTS, self.keys[stop], record)
        self._block_keys += block_keys
        self._checkpoint_keys.append(self.keys[stop])
        self._note_checkpoint(stop)
        self._cache.report_write(None)

    def _note_checkpoint(self, stop: int) -> None:
        self.last_checkpoint = stop
        if stop not in self._next_keys:
            return
        if len(self._cache.continuations) > _MAX_REMEMBERED:
            self._cache.continuations.clear()
        next_keys = self._cache.continuations.setdefault(self.keys[stop], set())
        if len(next_keys) < _SHARED_BY:
            next_keys.add(self._next_keys[stop])
        if len(next_keys) == _SHARED_BY:
            self._shared = max(self._shared, stop)

    def close(self) -> None:
        """Wait for the disk after the prefill. Blocks count as used after the checkpoints that name them."""
        blocks = [(BLOCKS, key) for key in self._block_keys]
        self._folder.touch([*((CHECKPOINTS, key) for key in self._checkpoint_keys), *blocks])
        if self._shared in self.keys:
            count = max(0, self._shared - self._cache.plan.config.sinks) // ROWS
            self._folder.touch([(CHECKPOINTS, self.keys[self._shared]), *blocks[:count]], protect=True)
        if self._checkpoint_keys and not self._has_failed:
            self._folder.sync(CHECKPOINTS, self._checkpoint_keys[-1])
