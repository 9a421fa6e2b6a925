"""What a conversation is told at its beginning, checked before anything is computed."""

import re
from typing import Any

from mlx_tq.errors import ConfigError
from mlx_tq.session.plain_text import check_answer, check_text

SESSION_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # what the rescue service takes


def check_settings(
    system_prompt: Any, session_id: Any, max_tokens: Any, sampler: Any, seed: Any, prefill_step_size: Any
) -> None:
    """Raise where a setting of a session cannot be met.

    Raises:
        ConfigError: one cannot, with what could.
    """
    if system_prompt is not None:
        check_text(system_prompt, "system prompt")
    check_answer(max_tokens)
    if session_id is not None and not (isinstance(session_id, str) and SESSION_NAME.fullmatch(session_id)):
        raise ConfigError(f"session_id is {session_id!r:.80}; it must be 1 to 64 letters, digits, _ and -.")
    if not _is_whole(prefill_step_size, 1):
        raise ConfigError(f"prefill_step_size is {prefill_step_size!r}; it must be a whole number of 1 or more.")
    if seed is not None and not (_is_whole(seed, 0) and seed < 2**64):
        raise ConfigError(f"seed is {seed!r}; it must be a whole number from 0 to 2^64 - 1, or None.")
    if sampler is not None and not callable(sampler):
        raise ConfigError(
            f"sampler is of type {type(sampler).__name__}; it must be a function of log-probabilities, such as one of "
            "mlx_lm.sample_utils.make_sampler, or None."
        )


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
