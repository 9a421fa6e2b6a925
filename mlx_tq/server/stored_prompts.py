"""Prompts whose caches are stored: in memory, and in the prefix cache on disk."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlx_tq.prefix_cache.prefix_cache import CachedPrompt, PrefixCache
from mlx_tq.server.job import Job
from mlx_tq.server.job_recall import log_archive_warning
from mlx_tq.server.prompt_builder import Prompt
from mlx_tq.server.prompt_memory import PromptMemory
from mlx_tq.session.restore import release

# Upper bound of the seconds to restore a token, as a share of those to prefill it. Two CPU cores need 0.005.
_RESTORE_COST = 0.05
# A prompt may take this share longer to its first token if that lets it be stored.
_MAX_DELAY = 1 / 8
MIN_STORED = 32  # prefilling fewer tokens than this is faster than storing them


@dataclass(frozen=True)
class PromptSource:
    """The origin of a prompt's cached prefix: memory, or the prefix cache if that holds more of it."""

    caches: list[Any] | None
    cached_tokens: int
    stored: CachedPrompt | None = None


class StoredPrompts:
    """Finds and stores caches of prompts and answers."""

    def __init__(
        self, limit: int, decode: Callable[[list[int]], str], prefix_cache: PrefixCache | None, prefill_step_size: int
    ) -> None:
        self.memory = PromptMemory(limit, decode)
        self._prefix_cache, self._step = prefix_cache, prefill_step_size

    def insert(self, tokens: list[int], caches: list[Any]) -> None:
        """Store caches that hold `tokens` in memory."""
        release(caches)
        log_archive_warning(caches)
        self.memory.insert(tokens, caches)

    def find(self, job: Job, num_remaining: int, *, alone: bool = False) -> PromptSource:
        """Return the best source of a prompt except for its last `num_remaining` tokens.

        The caches belong to others; the batch copies them. Unless `alone`, all ranks search together.
        """
        if job.session is not None and job.session.caches is not None:
            return PromptSource(job.session.caches, job.session.cached_tokens)
        caches, cached_tokens = self.memory.find(
            job.prompt.ids, len(job.prompt.ids) - num_remaining, notes_use=not alone
        )
        if self._prefix_cache is not None:
            # A prompt that continues from memory does not follow the prefix cache's steps, so it is not stored.
            stored = _stored_prompt(self._prefix_cache, job.prompt, num_remaining, self._step)
            length, restorable = len(job.prompt.ids), stored.find(alone=alone)
            if length - restorable + _RESTORE_COST * restorable <= (1 + _MAX_DELAY) * (length - cached_tokens):
                return PromptSource(None, stored.cached_tokens, stored)
        return PromptSource(caches, cached_tokens)

    def follow(self, prompt: Prompt, leader: CachedPrompt | None, stop: int) -> CachedPrompt | None:
        """Continue storing after the first `stop` tokens of the leader's prompt; return None if that is impossible."""
        if self._prefix_cache is None or leader is None:
            return None
        stored = _stored_prompt(self._prefix_cache, prompt, 1, self._step)
        return stored if stored.follow(leader, stop) else None


def _stored_prompt(prefix_cache: PrefixCache, prompt: Prompt, num_remaining: int, step: int) -> CachedPrompt:
    segments = prompt.segments
    system = len(segments[0]) if len(segments) > 1 and prompt.kinds[0] == "system" else 0
    return prefix_cache.prompt([*segments[:-1], segments[-1][:-num_remaining]], step, system)


def salt_of(api_key: str | None, *, shared: bool) -> str:
    """Return the salt of the prefix cache's keys. Prompts of another API key never match, unless shared.

    Prompts of batches never match those of single sequences, which sum in another order.
    """
    digest = "" if shared or not api_key else hashlib.sha256(api_key.encode()).hexdigest()
    return f"server {digest}"
