"""Rolls caches back when drafts are rejected, and says in advance which caches cannot be rolled back."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import ArraysCache, BatchRotatingKVCache, RotatingKVCache, trim_prompt_cache

from mlx_tq.cache.latent import LatentKVCache
from mlx_tq.cache.layer import cache_parts
from mlx_tq.cache.recurrent_states import states_of, without_states
from mlx_tq.errors import UnsupportedModelError
from mlx_tq.integration.batch_probe import OneRow
from mlx_tq.integration.probe import native_caches
from mlx_tq.models import config_value, ranks_of


def draft_blocker(model: Any, caches: Sequence[Any]) -> str | None:
    """Return why drafts for a model cannot be verified on its caches, None if they can."""
    if not ranks_of(model).is_alone:
        return "ranks measure different times, so they would draft different tokens"
    rows = [row for part in _parts(caches) for row in getattr(part, "rows", [part])]
    if any(getattr(row, "evicts", False) for row in rows):
        return "an eviction round cannot be undone when a draft is rejected"
    return rollback_blocker(model, caches, keeps_states=True)


def rollback_blocker(model: Any, caches: Sequence[Any], *, keeps_states: bool = False) -> str | None:
    """Return why a model's caches cannot be rolled back, or None if they can.

    With `keeps_states`, a `VerifyPass` restores recurrent states.
    """
    if config_value(getattr(model, "args", None), "blocksparse_block_size"):
        return "the model's block-sparse attention gives other logits for several tokens than for one at a time"
    parts = _parts(caches)
    rows = [row for part in parts for row in getattr(part, "rows", [part])]
    if any(isinstance(row, LatentKVCache) and row.spec.indexed for row in rows):
        return "the model's indexer selects other latents for several tokens than for one at a time"
    stuck = sorted({type(part).__name__ for part in parts if not (_is_window(part) or _is_always_trimmable(part))})
    if keeps_states:
        stuck = [name for name in stuck if name != ArraysCache.__name__]
    if stuck:
        return f"the model's {' and '.join(stuck)} cannot be rolled back when a draft is rejected"
    return _find_window_mismatch(model) if any(map(_is_window, parts)) else None


def _find_window_mismatch(model: Any) -> str | None:
    """Let a model make the masks of a rollback; nothing is evaluated."""
    caches = native_caches(model)
    try:
        with rollback_windows(caches, 1):
            model(mx.zeros((1, 2), mx.int32), cache=caches)
    except UnsupportedModelError as error:
        return str(error)
    return None


def _parts(caches: Sequence[Any]) -> list[Any]:
    return cache_parts([cache.cache if isinstance(cache, OneRow) else cache for cache in caches])


def _is_window(part: Any) -> bool:
    """Return whether a cache is a sliding window that can be widened."""
    if type(part) is RotatingKVCache:
        return not part.keep  # whose masks would hide the first tokens
    return type(part) is BatchRotatingKVCache


def _is_always_trimmable(part: Any) -> bool:
    """Return whether a cache can be trimmed; a rotating one cannot as soon as it is full."""
    return type(part) is not RotatingKVCache and part.is_trimmable()


class _Widened:
    """A window that keeps older tokens: the part that is the same for one sequence and for a batch."""

    keys: Any
    values: Any
    offset: Any
    max_size: int
    window: int  # tokens that each token sees
    _idx: int

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return self._update_concat(keys, values)  # type: ignore[attr-defined]

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        n = min(n, 0 if self.keys is None else self.keys.shape[2])
        if n:
            self.keys, self.values = self.keys[..., :-n, :], self.values[..., :-n, :]
            self.offset = self.offset - n
            self._idx -= n
        return n

    @property
    def _stored(self) -> int:
        """The tokens that the next ones see, at most."""
        return 0 if self.keys is None else min(self.max_size - 1, self.keys.shape[2])

    def _check_window(self, window_size: int | None) -> int:
        window = window_size or self.window
        if window > self.window:  # as in plamo3: mlx-lm's decode step then sees fewer tokens than its prefill
            raise UnsupportedModelError(
                f"the model's prefill sees windows of {window} tokens, and its decode steps of {self.window}"
            )
        return window


class RollbackWindow(_Widened, RotatingKVCache):  # type: ignore[misc]
    """A sliding window that keeps as many older tokens as a rollback may need again, in their order."""

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        window = self._check_window(window_size)
        if self._stored + N > window or return_array:
            return create_causal_mask(N, self._stored, window_size=window)
        return "causal" if N > 1 else None


class RollbackBatchWindow(_Widened, BatchRotatingKVCache):  # type: ignore[misc]
    """Does what `RollbackWindow` does, for a batch."""

    _offset: int
    left_padding: mx.array

    def trim(self, n: int) -> int:
        n = super().trim(n)
        self._offset -= n
        return n

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        dropped = max(0, self._idx - self._stored)
        padding = self.left_padding - dropped
        return create_causal_mask(N, self._stored, window_size=self._check_window(window_size), left_padding=padding)


def widen_windows(caches: Sequence[Any], slack: int) -> list[Any]:
    """Widen the sliding windows of caches in place, so that up to `slack` tokens can be rolled back; return them."""
    windows = [part for part in _parts(caches) if _is_window(part)]
    for window in windows:
        if window.keys is not None:
            _order(window)
        is_batch = isinstance(window, BatchRotatingKVCache)
        window.__class__ = RollbackBatchWindow if is_batch else RollbackWindow
        window.window, window.max_size = window.max_size, window.max_size + slack
    return windows


def _order(window: Any) -> None:
    """Put the tokens of a sliding window into their order, without room for others."""
    if isinstance(window, BatchRotatingKVCache):
        window._temporal_order()
        window.keys, window.values = window.keys[..., : window._idx, :], window.values[..., : window._idx, :]
    else:
        window.keys, window.values = window._temporal_order(window.keys), window._temporal_order(window.values)
    window._idx = window.keys.shape[2]


def narrow_windows(windows: Sequence[Any]) -> None:
    """Undo `widen_windows`."""
    for window in windows:
        is_batch = isinstance(window, BatchRotatingKVCache)
        window.__class__ = BatchRotatingKVCache if is_batch else RotatingKVCache
        window.max_size = window.window
        del window.window
        if window.keys is not None and (excess := window.keys.shape[2] - window.max_size) > 0:
            window.keys, window.values = window.keys[..., excess:, :], window.values[..., excess:, :]
            window._idx = window.max_size
            if is_batch:
                window.left_padding = window.left_padding - excess


@contextmanager
def rollback_windows(caches: Sequence[Any], slack: int) -> Iterator[None]:
    """Widen the sliding windows of caches for the duration, so that up to `slack` tokens can be rolled back."""
    windows = widen_windows(caches, slack)
    try:
        yield
    finally:
        narrow_windows(windows)


class VerifyPass:
    """A pass that verifies drafts. It keeps the recurrent states from before the pass, without copying.

    `run` runs tokens through the model.
    """

    def __init__(self, caches: Sequence[Any], ids: list[int], run: Callable[[list[int]], Any]) -> None:
        self._caches, self._ids, self._run = caches, ids, run
        self._states = [(part, copy.deepcopy(part.state)) for part in states_of(_parts(caches))]

    def roll_back(self, count: int) -> None:
        """Drop the last `count` tokens. With recurrent states, the others run again from the kept states."""
        others = without_states(_parts(self._caches))
        if not self._states or not count:
            trim_prompt_cache(others, count)
            return
        trim_prompt_cache(others, len(self._ids))
        for part, state in self._states:
            part.state = state
        self._run(self._ids[: len(self._ids) - count])
        mx.eval([part.state for part, _ in self._states])  # so that its time counts here
