"""Prompts that begin alike, at once: the first request reads what they have in common, the others go on from there.

What they share of it, packed rows, is held once, and counts once against the memory of all.
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate
from typing import Any

from mlx_tq.cache.sharing import Shared, shared_rows
from mlx_tq.prompt_cache.passes import compressed_caches
from mlx_tq.prompt_cache.plan import Plan
from mlx_tq.server.jobs import Job
from mlx_tq.server.running import Running, rest_of


class Beginnings:
    """What jobs have in common.

    Args:
        plan: of their caches; None where these are mlx-lm's own, which share nothing.
        step: tokens of a prompt that are read at a time.
    """

    def __init__(self, plan: Plan | None, step: int) -> None:
        self._plan, self._step = plan, step

    def leader(self, job: Job, cached: int, running: Iterable[Running]) -> tuple[Running, int] | None:
        """Who is going to read most of what a job has to read, and up to where; None where nobody reads enough of it.

        Up to the end of a step of both, so that the job reads its prompt as it would alone. Nobody is waited for where
        tokens may leave, and take the rows with them.

        Args:
            job: to be begun.
            cached: tokens of its prompt that are there.
            running: jobs in the batch.
        """
        if self._plan is None or self._plan.recalls or job.goes_on:
            return None
        segments, _ = rest_of(job.prompt.segments, job.prompt.kinds, cached)
        ends = set(self.ends(segments, cached))
        best = None
        for one in running:
            least = max(one.prefilled, best[1] if best else 0)
            most = _in_common(job.prompt.ids, one.job.prompt.ids)
            stop = max((end for end in ends.intersection(one.ends) if least < end <= most), default=0)
            if stop and self.saved(job, stop) and self.saved(one.job, stop):
                best = one, stop
        return best

    def ends(self, segments: Sequence[Sequence[int]], cached: int) -> list[int]:
        """Where steps end in which segments behind `cached` tokens are read, but for the last token of all."""
        found, (*before, last) = [], [len(segment) for segment in segments]
        for start, length in zip(accumulate([cached, *before]), [*before, last - 1], strict=True):
            found += [min(start + n, start + length) for n in range(self._step, length + self._step, self._step)]
        return found

    def shared(self, job: Job, caches: list[Any] | None) -> Shared:
        """Rows of these caches that a job goes on sharing with whoever has them."""
        return shared_rows(compressed_caches(caches)) if caches and self.saved(job, job.tokens) else []

    # Bytes.

    def saved(self, job: Job, stop: int) -> int:
        """Of the first `stop` tokens of a job that goes on behind what another one has read."""
        return 0 if self._plan is None else self._plan.shared_nbytes(stop, job.tokens)

    def held(self, job: Job, caches: list[Any] | None, running: Iterable[Running]) -> int:
        """Of these caches, from which a job goes on, what running ones hold in any case."""
        known = {buffer for one in running for buffer, _ in one.shared}
        return sum(saved for buffer, saved in self.shared(job, caches) if buffer in known)

    def needed(self, job: Job) -> int:
        """At most, of the answers to a prompt; they share the prompt but for its last token."""
        return self._alone(job) + self._others(job.others)

    def reserved(self, running: Iterable[Running], joining: Iterable[Job] = ()) -> int:
        """At most, of running jobs, of those that wait for what they read, and of those that join them."""
        total, once = sum(map(self.needed, joining)), set()
        for one in running:
            total += self._alone(one.job) + self._others(one.pending)
            total += sum(self.needed(job) - self.saved(job, stop) for job, stop in one.followers)
            for known, saved in one.shared:
                buffer = known()
                if buffer is not None and len(buffer.bodies) > 1:
                    total -= saved
                    once.add(buffer)
        return total + sum(buffer.nbytes for buffer in once)

    def _alone(self, job: Job) -> int:
        return 0 if self._plan is None else self._plan.peak_nbytes(job.tokens) + job.kept_nbytes

    def _others(self, jobs: list[Job]) -> int:
        return sum(self._alone(job) - self.saved(job, len(job.prompt.ids) - 1) for job in jobs)


def _in_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens with which both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (here, there) in pairs if here != there), min(len(one), len(other)))


def jobs_of(running: Collection[Running]) -> list[Job]:
    """Running jobs, and those that wait for what they read."""
    return [job for one in running for job in (one.job, *(job for job, _ in one.followers))]


def answers(running: Collection[Running]) -> int:
    """How many answers these jobs are or will be."""
    waiting = sum(1 + len(job.others) for one in running for job, _ in one.followers)
    return waiting + sum(1 + len(one.pending) for one in running)
