"""Admission: which waiting job may join the batch, by its slots and by memory.

Jobs whose prompts share a prefix share its packed rows, which count once. If the shared prefix is not prefilled yet,
one job (the leader) prefills it and the others follow.
"""

import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlx_tq.cache.packed_rows import SharedBuffers
from mlx_tq.cache.recurrent_states import DEFAULT_STATES, StateStorage
from mlx_tq.cli.screen import human_bytes
from mlx_tq.prefix_cache.prefix_cache import common_prefix
from mlx_tq.prompt_cache.layer_group import compressed_caches
from mlx_tq.prompt_cache.plan import Plan
from mlx_tq.server.job import Job, RunningJob
from mlx_tq.server.memory_need import MemoryNeed
from mlx_tq.server.prefill_grid import PrefillGrid
from mlx_tq.server.sessions import Sessions
from mlx_tq.server.stored_prompts import StoredPrompts


@dataclass(frozen=True)
class EngineLimits:
    """Limits of the engine.

    `memory` is the bytes of all caches and, if `memory_includes_steps`, of what a prefill step takes for a moment; None
    where caches are not compressed.
    """

    concurrency: int  # answers generated concurrently
    prompt_concurrency: int  # prompts prefilled concurrently
    batches: bool = field(default=True, kw_only=True)  # whether the model can; else `concurrency` is 1
    pads_prompts: bool = field(default=True, kw_only=True)  # so that steps of different lengths run together
    queue: int  # waiting jobs
    prefill_grid: PrefillGrid
    prompt_cache_bytes: int = sys.maxsize
    states: StateStorage = DEFAULT_STATES  # of stored prompts
    memory: int | None = None
    memory_includes_steps: bool = False
    decode_share: float = 0.5  # of the time that running answers keep while prompts are prefilled
    stalled_s: float = 120.0  # a longer step makes the server unhealthy
    metrics_interval_s: float = 0.1  # measuring memory reads the size of every array


class Admission:
    """Decides whether jobs fit into the batch, and what they share."""

    def __init__(
        self,
        plan: Plan | None,
        need: MemoryNeed | None,
        limits: EngineLimits,
        stored_prompts: StoredPrompts,
        sessions: Sessions | None,
    ) -> None:
        self._plan, self._need, self._limits = plan, need, limits
        self._stored_prompts, self._sessions = stored_prompts, sessions

    def blocked_reason(self, job: Job, running: Collection[RunningJob], admitted: Sequence[Job]) -> str | None:
        """Return why `job` cannot join, or None. Alone it always can, which was checked when the request came."""
        if not running and not admitted:
            return None
        waiting = (*admitted, job, *(follower for other in running for follower in other.followers))
        answers = sum(len(other.answers) for other in waiting) + sum(1 + len(other.pending) for other in running)
        if answers > self._limits.concurrency:
            return f"as many answers run as may run at once (--decode-concurrency {self._limits.concurrency})"
        if self._need is None:
            return None
        missing = self.reserved_nbytes(running, (*admitted, job)) - self._need.available
        if missing <= 0 or (not admitted and self._shareable_nbytes(job, missing, running) >= missing):
            return None
        what = "KV cache and prefill need" if self._limits.memory_includes_steps else "KV cache needs"
        return f"its {what} {human_bytes(missing)} more than is free of {human_bytes(self._need.available)}"

    def room_for_stored_prompts(self, running: Collection[RunningJob], admitted: Sequence[Job]) -> int | None:
        """Return the bytes that remain for stored prompts, or None for no change. Sessions give way first."""
        if self._need is None or not admitted:
            return None
        room = self._need.available - self.reserved_nbytes(running, admitted)
        if self._sessions is not None:
            self._sessions.trim_to(room)
            room -= self._sessions.nbytes
        return max(0, room)

    def find_leader(self, job: Job, cached_tokens: int, running: Iterable[RunningJob]) -> tuple[RunningJob, int] | None:
        """Return the running job that will prefill most of what `job` still needs, and the position up to which.

        The position ends a prefill step of both, so that `job` computes what it would alone. There is no leader where
        tokens may be evicted, because eviction moves shared rows.
        """
        if self._plan is None or self._plan.recalls or job.continues_session:
            return None
        ends = set(self._limits.prefill_grid.ends(job.prompt.remaining_segments(cached_tokens), cached_tokens))
        best, ids = None, np.array(job.prompt.ids)
        for candidate in running:
            if candidate.job.continues_session:
                continue
            shortest = max(candidate.prefilled, best[1] if best else 0)
            longest = common_prefix(ids, np.array(candidate.job.prompt.ids))
            common_ends = ends.intersection(candidate.step_ends)
            stop = max((end for end in common_ends if shortest < end <= longest), default=0)
            if stop and self.shared_nbytes(job, stop) and self.shared_nbytes(candidate.job, stop):
                best = candidate, stop
        return best

    def shared_rows(self, job: Job, caches: list[Any] | None) -> SharedBuffers:
        """Return the rows of `caches` that a job which continues from them will share."""
        shares = caches and self.shared_nbytes(job, job.max_total_tokens)
        layers = compressed_caches(caches or []) if shares else []
        return [buffer for layer in layers for buffer in layer.shareable_buffers()]

    def shared_nbytes(self, job: Job, stop: int) -> int:
        """Return the bytes of the first `stop` tokens that `job` can share."""
        return 0 if self._plan is None else self._plan.shared_nbytes(stop, job.max_total_tokens)

    def reserved_nbytes(self, running: Collection[RunningJob], joining: Collection[Job]) -> int:
        """Return the peak bytes of running jobs, their followers and joining jobs; shared rows count once.

        What a prefill step of the longest of them takes is included, if the limit is for that too.
        """
        jobs = [*joining, *(job for other in running for job in (other.job, *other.followers))]
        total, buffers = sum(map(self._peak_nbytes, joining)), set()
        if self._need is not None:
            total += self._need.step_nbytes(max((job.max_total_tokens for job in jobs), default=0))
        for other in running:
            total += self._answer_nbytes(other.job) + self._others_nbytes(other.pending)
            total += sum(
                self._peak_nbytes(job) - self.shared_nbytes(job, stop) for job, stop in other.followers.items()
            )
            for reference, nbytes in other.shared:
                buffer = reference()
                if buffer is not None:
                    total -= nbytes
                    buffers.add(buffer)
        return total + sum(buffer.nbytes for buffer in buffers)

    def _shareable_nbytes(self, job: Job, needed: int, running: Collection[RunningJob]) -> int:
        """Return the bytes of `job` that running jobs hold or will hold; 0 if they cannot reach `needed`."""
        if job.continues_session or self.shared_nbytes(job, len(job.prompt.ids)) < needed:
            return 0
        source = self._stored_prompts.find(job, 1, alone=True)
        if (leader := self.find_leader(job, source.cached_tokens, running)) is not None:
            return self.shared_nbytes(job, leader[1])
        caches = source.caches
        if caches is None and source.stored is not None:
            caches = source.stored.live_caches
        buffers = {buffer for other in running for buffer, _ in other.shared}
        return sum(nbytes for buffer, nbytes in self.shared_rows(job, caches) if buffer in buffers)

    def _peak_nbytes(self, job: Job) -> int:
        """Return the peak bytes of all answers to a prompt, which share it except for its last token."""
        return self._answer_nbytes(job) + self._others_nbytes(job.others)

    def _answer_nbytes(self, job: Job) -> int:
        return 0 if self._need is None else self._need.caches_nbytes(job.max_total_tokens) + job.session_nbytes

    def _others_nbytes(self, jobs: Iterable[Job]) -> int:
        return sum(self._answer_nbytes(job) - self.shared_nbytes(job, len(job.prompt.ids) - 1) for job in jobs)
