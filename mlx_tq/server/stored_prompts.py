"""Prompts whose caches are stored: in memory, and in the prefix cache on disk."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_tq.cache.layer import can_trim
from mlx_tq.cache.recurrent_states import EXACT
from mlx_tq.prefix_cache.prefix_cache import CachedPrompt, PrefixCache, common_prefix
from mlx_tq.server.job import Job, SessionCaches
from mlx_tq.server.job_recall import log_archive_warning
from mlx_tq.server.prompt_memory import PromptMemory, copy_prefix, has_evicted
from mlx_tq.server.sessions import Sessions
from mlx_tq.session.restore import release

# Upper bound of the seconds to restore a token, as a share of those to prefill it.
_RESTORE_COST = 0.05
MIN_STORED = 32  # prefilling fewer tokens than this is faster than storing them
STORED_STEP = 2048  # tokens of a long prompt after which it is stored on disk while it is prefilled


@dataclass(frozen=True)
class PromptSource:
    """The origin of a prompt's cached prefix: caches in memory, or the prefix cache if that holds more of it."""

    caches: list[Any] | None
    cached_tokens: int
    stored: CachedPrompt | None = None  # the prompt in the prefix cache, if there is one


class StoredPrompts:
    """Finds and stores caches of prompts and answers; finds those of `sessions`, too."""

    def __init__(
        self,
        limit: int,
        decode: Callable[[list[int]], str],
        prefix_cache: PrefixCache | None,
        sessions: Sessions | None = None,
        state_format: str = EXACT,
    ) -> None:
        self.memory = PromptMemory(limit, decode, state_format)
        self._prefix_cache, self._sessions = prefix_cache, sessions

    def insert(self, tokens: list[int], caches: list[Any], stored: CachedPrompt | None) -> None:
        """Store caches that hold `tokens` in memory; `stored` knows what of them is on the disk."""
        if stored is not None:
            stored.mark(caches)
        release(caches)
        log_archive_warning(caches)
        self.memory.insert(tokens, caches)

    def find(self, job: Job, num_remaining: int, *, alone: bool = False) -> PromptSource:
        """Return the best source of a prompt except for its last `num_remaining` tokens.

        The caches belong to others; the batch copies them. Unless `alone`, all ranks search together.
        """
        if job.session is not None and job.session.caches is not None:
            return self.continued(job, job.session.caches, job.session.cached_tokens)
        ids = job.prompt.ids[: len(job.prompt.ids) - num_remaining]
        caches, cached_tokens = self.memory.find(ids, len(ids), notes_use=not alone)
        if not alone and (longest := self._longest_in_session(ids)) is not None and longest[1] > cached_tokens:
            copied = copy_prefix(longest[0], longest[1], len(longest[0].tokens))
            if copied is not None:
                caches, cached_tokens = copied, longest[1]
        if self._prefix_cache is not None:
            stored = CachedPrompt(self._prefix_cache, ids)
            restorable = stored.find(alone=alone)
            if (1 - _RESTORE_COST) * restorable > cached_tokens:
                return PromptSource(None, restorable, stored)
        return self.continued(job, caches, cached_tokens)

    def _longest_in_session(self, ids: list[int]) -> tuple[SessionCaches, int] | None:
        """Return the caches of the session that has the longest prefix of a prompt, and its length.

        Sessions that evicted tokens are skipped: other answers would depend on what these evicted.
        """
        tokens = np.array(ids, np.int64)
        lengths = [
            (other, common)
            for other in ([] if self._sessions is None else self._sessions.all_caches())
            if (common := common_prefix(other.tokens, tokens))
            and (common == len(other.tokens) or can_trim(other))
            and not has_evicted(other)
        ]
        return max(lengths, key=lambda pair: pair[1], default=None)

    def longest(self, ids: list[int]) -> int:
        """Return how many first tokens of a prompt are stored, in memory or on this rank's disk; any thread may ask."""
        in_session = self._longest_in_session(ids[:-1])
        in_memory = max(self.memory.longest(ids, len(ids) - 1), 0 if in_session is None else in_session[1])
        if self._prefix_cache is None:
            return in_memory
        return max(in_memory, CachedPrompt(self._prefix_cache, ids[:-1]).find(alone=True))

    def continued(self, job: Job, caches: list[Any] | None, cached_tokens: int) -> PromptSource:
        """Return the source of a prompt whose first tokens these caches hold."""
        cache = self._prefix_cache
        return PromptSource(
            caches, cached_tokens, None if cache is None else CachedPrompt(cache, job.prompt.ids, cached_tokens)
        )


def salt_of(api_key: str | None, *, shared: bool) -> str:
    """Return the salt of the prefix cache's keys. Prompts of another API key never match, unless shared.

    Prompts of batches never match those of single sequences, which sum in another order.
    """
    digest = "" if shared or not api_key else hashlib.sha256(api_key.encode()).hexdigest()
    return f"server {digest}"
