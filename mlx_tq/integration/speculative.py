"""Speculative decoding that rolls sliding windows back; what cannot roll back is refused before it starts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import mlx.core as mx
from mlx_lm.generate import speculative_generate_step as _mlx_lm_speculative
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from mlx_tq.cache.layer import cache_parts
from mlx_tq.errors import UnsupportedModelError
from mlx_tq.integration.patches import Patched, replace_function
from mlx_tq.integration.probe import architecture_name, native_caches
from mlx_tq.models import config_value

_DRAFT_TOKENS = 2  # mlx-lm's default


class RollbackWindow(RotatingKVCache):  # type: ignore[misc]
    """A sliding window that keeps as many older tokens as a rollback may need again, in their order."""

    keys: Any
    values: Any
    window: int  # tokens that each token sees

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return self._update_concat(keys, values)

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        if n:
            self.keys, self.values = self.keys[..., :-n, :], self.values[..., :-n, :]
            self.offset -= n
            self._idx -= n
        return n

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        window = window_size or self.window
        if window > self.window:  # as in plamo3: mlx-lm's decode step then sees fewer tokens than its prefill
            raise UnsupportedModelError(
                f"speculative decoding is not supported for this model: its prefill sees windows of {window} tokens, "
                f"and its decode steps of {self.window}. Drop the draft model."
            )
        stored = 0 if self.keys is None else min(self.max_size - 1, self.keys.shape[2])
        if stored + N > window or return_array:
            return create_causal_mask(N, stored, window_size=window)
        return "causal" if N > 1 else None


def _widen(cache: RotatingKVCache, slack: int) -> None:
    """Turn a sliding window, in place, into one that can forget its last `slack` tokens."""
    if cache.keys is not None:
        cache.keys, cache.values = cache._temporal_order(cache.keys), cache._temporal_order(cache.values)
        cache._idx = cache.keys.shape[2]
    cache.__class__ = RollbackWindow
    cache.window, cache.max_size = cache.max_size, cache.max_size + slack


def _narrow(cache: Any) -> None:
    """Undo `_widen`."""
    cache.__class__, cache.max_size = RotatingKVCache, cache.window
    del cache.window
    if cache.keys is not None:
        cache.keys, cache.values = cache.keys[..., -cache.max_size :, :], cache.values[..., -cache.max_size :, :]
        cache._idx = cache.keys.shape[2]


def check_rollback(model: Any, caches: Sequence[Any]) -> None:
    """Raise UnsupportedModelError if a model's caches cannot forget their last tokens."""
    if config_value(getattr(model, "args", None), "blocksparse_block_size"):
        raise UnsupportedModelError(
            f"speculative decoding is not supported for {architecture_name(model)}: its block-sparse attention gives "
            "several tokens other logits than one at a time. Drop the draft model."
        )
    stuck = [part for part in cache_parts(caches) if not (type(part) is RotatingKVCache or part.is_trimmable())]
    stuck += [part for part in cache_parts(caches) if type(part) is RotatingKVCache and part.keep]
    if stuck:
        raise UnsupportedModelError(
            f"speculative decoding is not supported for {architecture_name(model)}: its "
            f"{' and '.join(sorted({type(part).__name__ for part in stuck}))} cannot forget rejected tokens. Drop the "
            "draft model."
        )


def widen_windows(caches: Sequence[Any], slack: int) -> list[Any]:
    """Let the sliding windows of caches forget up to `slack` last tokens, and return them."""
    windows = [part for part in cache_parts(caches) if type(part) is RotatingKVCache and not part.keep]
    for window in windows:
        _widen(window, slack)
    return windows


@contextmanager
def rollback_windows(caches: Sequence[Any], slack: int) -> Iterator[None]:
    """Let the sliding windows of caches forget up to `slack` last tokens within the block."""
    windows = widen_windows(caches, slack)
    try:
        yield
    finally:
        for window in windows:
            _narrow(window)


class _Counted:
    """A model with as many layers as caches, by which mlx-lm tells them from those of the draft model."""

    def __init__(self, model: Any, count: int) -> None:
        self._model, self.layers = model, range(count)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._model(*args, **options)


@wraps(_mlx_lm_speculative)
def speculative_generate_step(
    prompt: mx.array, model: Any, draft_model: Any, *args: Any, prompt_cache: list[Any] | None = None, **options: Any
) -> Iterator[Any]:
    """Run mlx-lm's speculative decoding on caches that can roll back, or raise before it starts."""
    caches = prompt_cache or [*make_prompt_cache(model), *make_prompt_cache(draft_model)]
    counted = _Counted(model, len(native_caches(model)))
    check_rollback(model, caches[: len(counted.layers)])
    # The draft model makes a pass for each guess, and may have to forget all of them.
    with rollback_windows(caches, options.get("num_draft_tokens", _DRAFT_TOKENS) + 2):
        yield from _mlx_lm_speculative(prompt, counted, draft_model, *args, prompt_cache=caches, **options)


patch_speculative = partial(
    Patched(partial(replace_function, _mlx_lm_speculative, speculative_generate_step)).open, _mlx_lm_speculative
)
