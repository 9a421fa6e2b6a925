"""`OrderBroadcast`: the first rank decides what the engines of all ranks do before their next step."""

import weakref
from collections.abc import Callable, MutableMapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import mlx.core as mx

from mlx_tq.distributed.group import Ranks
from mlx_tq.server.job import Job, SessionCaches, SessionStart
from mlx_tq.server.prompt_builder import Prompt
from mlx_tq.server.sampling import Sampler
from mlx_tq.session.transcript import SearchHits


@dataclass(frozen=True)
class Orders:
    """Jobs to admit, and batch uids of jobs to remove, before a step.

    Stored prompts beyond `stored_prompt_bytes` are removed, if it is not None; `prefills` is whether the step may
    prefill.
    """

    admitted: list[Job] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    stored_prompt_bytes: int | None = None
    prefills: bool = True
    keep_running: bool = True


class OrderBroadcast:
    """Sends orders from the first rank to the others, and keeps the sessions' caches of all ranks in agreement."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._count = 0
        self._released: list[int] = []  # on the first rank: numbers of caches that no session holds any more
        self._caches: dict[int, SessionCaches] = {}  # on the others, by number
        # Placeholders for the first rank's: one object per sampler, so that mlx-lm batches rows as there.
        self._samplers: MutableMapping[int, Sampler] = weakref.WeakValueDictionary()

    def share(self, decide: Callable[[], Orders], *, idle: bool) -> Orders:
        """Return what `decide` returns on the first rank, which alone calls it. If `idle`, it may wait for a job."""
        if self._ranks.is_alone:
            return decide()
        decided: list[Orders] = []

        def message() -> dict[str, Any] | None:
            decided.append(decide())
            if decided[0] == Orders():  # most steps
                return None
            released = self._released[:]
            del self._released[: len(released)]
            admitted = [_job_message(job) for job in decided[0].admitted]
            return {**vars(decided[0]), "admitted": admitted, "released": released}

        if idle:
            self._ranks.synchronize()
        received = (self._ranks.broadcast_when_ready if idle else self._ranks.broadcast)(message)
        if decided:
            return decided[0]
        if received is None:
            return Orders()
        for number in received.pop("released"):
            del self._caches[number]
        return Orders(**{**received, "admitted": [self._job(**job) for job in received["admitted"]]})

    def register(self, caches: list[Any]) -> SessionCaches:
        """Number the caches of a session. Other ranks hold theirs until the first rank releases its own."""
        registered = SessionCaches(caches)
        registered.number, self._count = self._count, self._count + 1
        if not self._ranks.is_first:
            self._caches[registered.number] = registered
        elif not self._ranks.is_alone:
            weakref.finalize(registered, self._released.append, registered.number).atexit = False
        return registered

    def _job(
        self,
        prompt: dict[str, Any],
        max_tokens: list[int],
        samplers: list[int],
        session: dict[str, Any] | None,
        only_prefills: bool,
    ) -> Job:
        """Return a job whose tokens the first rank samples, and whose events no client receives."""
        start = None
        if session is not None:
            hits = SearchHits(tuple(map(tuple, session["hit_ranges"])), session["hit_limit"])
            caches = None if session["caches"] is None else self._caches[session["caches"]]
            start = SessionStart(caches, session["cached_tokens"], session["user_start"], hits)
        first, *others = (
            Job(
                Prompt(**prompt),
                count,
                self._samplers.setdefault(sampler, partial(mx.argmax, axis=-1)),
                [],
                index=index,
                session=start,
                only_prefills=only_prefills,
            )
            for index, (count, sampler) in enumerate(zip(max_tokens, samplers, strict=True))
        )
        return replace(first, others=tuple(others))


def _job_message(job: Job) -> dict[str, Any]:
    start = job.session
    return {
        "prompt": asdict(job.prompt),
        "max_tokens": [answer.max_tokens for answer in job.answers],
        "samplers": [id(answer.sampler) for answer in job.answers],
        "only_prefills": job.only_prefills,
        "session": start
        and {
            "caches": None if start.caches is None else start.caches.number,
            "cached_tokens": start.cached_tokens,
            "user_start": start.user_start,
            "hit_ranges": start.search_hits.ranges,
            "hit_limit": start.search_hits.limit,
        },
    }
