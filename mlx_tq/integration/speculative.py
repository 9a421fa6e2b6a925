"""Speculative decoding that rolls sliding windows back; what cannot roll back is refused before it starts."""

from collections.abc import Iterator, Sequence
from functools import partial, wraps
from typing import Any

import mlx.core as mx
from mlx_lm.generate import speculative_generate_step as _mlx_lm_speculative
from mlx_lm.models.cache import make_prompt_cache

from mlx_tq.errors import UnsupportedModelError
from mlx_tq.integration.patches import Patched, replace_function
from mlx_tq.integration.probe import architecture_name, native_caches
from mlx_tq.integration.rollback import rollback_blocker, rollback_windows

_DRAFT_TOKENS = 2  # mlx-lm's default


def check_rollback(model: Any, caches: Sequence[Any]) -> None:
    """Raise UnsupportedModelError if a model's caches cannot be rolled back."""
    if reason := rollback_blocker(model, caches):
        raise UnsupportedModelError(
            f"speculative decoding is not supported for {architecture_name(model)}: {reason}. Drop the draft model."
        )


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
    count = len(counted.layers)
    check_rollback(model, caches[:count])
    check_rollback(draft_model, caches[count:])
    # The draft model makes a pass for each drafted token, and may have to roll back all of them.
    with rollback_windows(caches, options.get("num_draft_tokens", _DRAFT_TOKENS) + 2):
        yield from _mlx_lm_speculative(prompt, counted, draft_model, *args, prompt_cache=caches, **options)


patch_speculative = partial(
    Patched(partial(replace_function, _mlx_lm_speculative, speculative_generate_step)).open, _mlx_lm_speculative
)
