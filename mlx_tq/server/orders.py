"""What the engines of all ranks do before their next step: the first one decides, as it alone hears of requests."""

import weakref
from collections.abc import Callable, MutableMapping
from dataclasses import asdict, dataclass, field
from typing import Any

import mlx.core as mx

from mlx_tq.distributed.group import Ranks
from mlx_tq.prompt_cache.passes import sequence_in
from mlx_tq.server.conversation import Prompt
from mlx_tq.server.jobs import Job, SessionCaches, Start
from mlx_tq.session.recall import Named


@dataclass(frozen=True)
class Orders:
    """Before a step.

    Attributes:
        admitted: jobs that join the batch.
        ended, abandoned, failed: batch uids of jobs to remove: completed, abandoned, failed.
        room: bytes that caches kept for later requests may take from now on; None where that stays as it was.
        goes_on: whether there is a step.
    """

    admitted: list[Job] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    abandoned: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    room: int | None = None
    goes_on: bool = True


class Following:
    """The way of orders from the first rank to the others, which keep their part of what its sessions keep.

    Args:
        ranks: of the model; alone, orders are what they are.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._count = 0
        self._let_go: list[int] = []  # on the first rank: caches that nobody there holds any more
        self._kept: dict[int, SessionCaches] = {}  # on the others
        self._samplers: MutableMapping[int, _Told] = weakref.WeakValueDictionary()

    def told(self, decide: Callable[[], Orders], *, idle: bool) -> Orders:
        """What `decide` returns on the first rank; the others get of each job what a batch needs to know.

        Args:
            decide: called on the first rank alone.
            idle: it may wait for a request.
        """
        if self._ranks.is_alone:
            return decide()
        own: list[Orders] = []

        def tell() -> dict[str, Any] | None:
            own.append(decide())
            if own[0] == Orders():  # most steps
                return None
            let_go = self._let_go[:]
            del self._let_go[: len(let_go)]
            admitted = [_about(job) for job in own[0].admitted]
            return {**vars(own[0]), "admitted": admitted, "let_go": let_go}

        if idle:
            self._ranks.synchronize()
        found = (self._ranks.broadcast_when_ready if idle else self._ranks.broadcast)(tell)
        if own:
            return own[0]
        if found is None:
            return Orders()
        for number in found.pop("let_go"):
            del self._kept[number]
        return Orders(**{**found, "admitted": [self._job(**about) for about in found["admitted"]]})

    def keep(self, caches: list[Any]) -> SessionCaches:
        """Caches that a session goes on with: on the first rank as long as it holds them, on the others until told."""
        kept = SessionCaches(caches)
        kept.number, self._count = self._count, self._count + 1
        if not self._ranks.is_first:
            self._kept[kept.number] = kept
            sequence = sequence_in(caches)
            if sequence is not None:
                sequence.take_departed()  # which the first rank tells the rescue service
        elif not self._ranks.is_alone:
            weakref.finalize(kept, self._let_go.append, kept.number).atexit = False
        return kept

    def _job(self, prompt: dict[str, Any], tokens: list[int], samplers: list[int], start: dict[str, Any] | None) -> Job:
        """A job whose tokens the first rank chooses, and which nobody here hears of."""
        job, *job.others = (
            Job(Prompt(**prompt), most, self._samplers.setdefault(sampler, _Told()), [], index=index)
            for index, (most, sampler) in enumerate(zip(tokens, samplers, strict=True))
        )
        job.start = None if start is None else self._start(**start)
        return job

    def _start(self, caches: int | None, cached: int, at: int, named: dict[str, Any]) -> Start:
        ranges = tuple((first, stop) for first, stop in named["ranges"])
        return Start(None if caches is None else self._kept[caches], cached, at, Named(ranges, named["limit"]))


def _about(job: Job) -> dict[str, Any]:
    """A job as JSON has it."""
    answers, start = [job, *job.others], job.start
    return {
        "prompt": asdict(job.prompt),
        "tokens": [each.max_tokens for each in answers],
        "samplers": [id(each.sampler) for each in answers],
        "start": start
        and {
            "caches": None if start.caches is None else start.caches.number,
            "cached": start.cached,
            "at": start.at,
            "named": asdict(start.named),
        },
    }


class _Told:
    """Stands for a sampler of the first rank: mlx-lm calls one once for all rows that have it, here as there."""

    def __call__(self, logprobs: mx.array) -> mx.array:
        return mx.argmax(logprobs, axis=-1)
