"""`Engine`: one thread that generates the answers of all jobs with mlx-lm's batch generator over compressed caches."""

import asyncio
import logging
import secrets
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from itertools import count
from threading import Condition, Thread
from typing import Any
from weakref import WeakValueDictionary

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator, make_stop_sequences

from mlx_tq.cli.runner import end_rank
from mlx_tq.config import PROFILES, KVConfig
from mlx_tq.errors import is_out_of_memory
from mlx_tq.integration.batch_probe import OneRow
from mlx_tq.integration.probe import native_caches
from mlx_tq.models import ranks_of
from mlx_tq.prefix_cache.prefix_cache import CachedPrompt, PrefixCache
from mlx_tq.prompt_cache.build import build_caches
from mlx_tq.prompt_cache.capacity import all_arrays, with_trimmed_windows
from mlx_tq.prompt_cache.compressed import compressed
from mlx_tq.prompt_cache.layer_group import batch_row
from mlx_tq.prompt_cache.memory import choose_state_storage, other_bytes, sequence_bytes
from mlx_tq.prompt_cache.plan import Plan
from mlx_tq.prompt_cache.run_summary import RunSummary
from mlx_tq.prompt_cache.statistics import cache_stats
from mlx_tq.server.admission import Admission, EngineLimits
from mlx_tq.server.api_errors import ApiError, ModelFailedError, QueueFullError, UnavailableError
from mlx_tq.server.awake import StayAwake
from mlx_tq.server.broadcast import OrderBroadcast, Orders
from mlx_tq.server.decode_share import DecodeShare
from mlx_tq.server.drafting_batch import DraftingBatch
from mlx_tq.server.job import (
    Event,
    HeldCaches,
    Job,
    Piece,
    PrefillProgress,
    Quoted,
    RunningJob,
    SessionResult,
    Started,
)
from mlx_tq.server.job_recall import JobRecall
from mlx_tq.server.memory_need import MemoryNeed
from mlx_tq.server.metrics import Metrics
from mlx_tq.server.prefill_grid import segment_ends
from mlx_tq.server.prefill_order import PrefillOrder, PromptToPrefill
from mlx_tq.server.sampling import ErrorGuard
from mlx_tq.server.sessions import Sessions
from mlx_tq.server.stored_prompts import MIN_STORED, STORED_STEP, PromptSource, StoredPrompts
from mlx_tq.session.restore import evict_before_question, release
from mlx_tq.speculative.drafts import Drafter
from mlx_tq.speculative.lookup_mode import NO_LOOKUP

log = logging.getLogger(__name__)

_EARLIER_STEPS = 0.98  # decay per step in the estimate of prefill speed


class OneRowModel:
    """The model, for a batch of one sequence whose caches cannot be batched."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, tokens: mx.array, cache: Any = None) -> Any:
        return self._model(tokens, cache=[part.cache for part in cache])

    def make_cache(self) -> list[OneRow]:
        return list(map(OneRow, native_caches(self._model)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class RecordedModel:
    """The model, as mlx-lm's batch calls it, with the caches of the passes since `passes` was cleared.

    mlx-lm's batch gives out copies of its caches only, and recall needs the caches themselves.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.passes: list[Any] = []

    def __call__(self, tokens: mx.array, cache: Any = None) -> Any:
        cache = [part.cache if isinstance(part, OneRow) else part for part in cache]
        self.passes.append(cache)
        return self._model(tokens, cache=cache)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class Engine:
    """Generates answers for jobs. `prefix_cache` must have been made for the same plan."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        config: KVConfig,
        plan: Plan | None,
        limits: EngineLimits,
        metrics: Metrics,
        sessions: Sessions | None = None,
        prefix_cache: PrefixCache | None = None,
        *,
        drafter: Drafter = NO_LOOKUP,
    ) -> None:
        self._model, self._tokenizer, self._config, self._plan = model, tokenizer, config, plan
        self._ranks = ranks_of(model)
        self._broadcast = OrderBroadcast(self._ranks)
        self.limits, self.metrics = limits, metrics
        self._changed = Condition()  # guards the next five
        self._waiting: deque[Job] = deque()
        self._stopping = False
        self._clear_requests: list[asyncio.Event] = []  # set when stored prompts have been removed
        self._blocked_reason: str | None = None  # of the first waiting job
        self._job_ahead: Job | None = None  # the last one that only prefills
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._step_started: float | None = None  # None while idle
        # Only the engine's thread changes what follows.
        self._running: dict[int, RunningJob] = {}  # by mlx-lm's uid; by a negative number while not in its batch
        self._numbers = count(1)  # of jobs, and of the keys of those outside of the batch
        self._events: list[tuple[Job, Event | SessionResult]] = []  # of this step
        self._finished: list[int] = []  # uids of jobs to remove before the next step
        self._suspended: list[RunningJob] = []  # after memory errors, until fewer than `_resume_below` jobs run
        self._resume_below = 0
        self._stop_sequences = make_stop_sequences(tokenizer)
        self._drafter = drafter
        self._prefill_order = PrefillOrder(pads=limits.pads_prompts)
        # Sessions are local to rank 0, but all ranks must get the same cache hits.
        shared_sessions = sessions if self._ranks.is_alone else None
        self._stored_prompts = StoredPrompts(
            limits.prompt_cache_bytes, tokenizer.decode, prefix_cache, shared_sessions, limits.states.format
        )
        self._states = choose_state_storage(model, limits.states)
        self.memory_need: MemoryNeed | None = None
        if plan is not None and limits.memory is not None:
            self.memory_need = MemoryNeed(
                *(model, plan, limits.prefill_grid, limits.memory),
                includes_steps=limits.memory_includes_steps,
                state_format=limits.states.format,
            )
        self._admission = Admission(plan, self.memory_need, limits, self._stored_prompts, sessions)
        self._samplers: MutableMapping[int, ErrorGuard] = WeakValueDictionary()  # by id of the job's sampler
        self._decode_share = DecodeShare(limits.decode_share)
        self._stay_awake = StayAwake()
        self._recall = JobRecall(model, tokenizer, plan, limits.prefill_grid.first)
        self._measured_at = 0.0
        self._jobs: list[dict[str, Any]] = []  # what the web side may see of the running ones
        self._prefilled = self._prefill_seconds = 0.0  # tokens, and seconds to prefill them; earlier steps count less
        self._has_logged_run = False
        self._native_nbytes = None if plan is None else sequence_bytes(model, PROFILES["off"], other_bytes(model))

    # For the web side.

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread; events of jobs are delivered on `loop`."""
        self._loop = loop
        self._thread.start()

    def stop(self) -> None:
        """End running answers with an error and refuse further jobs. Returns immediately."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def join(self, timeout: float | None = None) -> None:
        self.stop()
        if self._thread.is_alive():
            self._thread.join(timeout)

    @property
    def is_healthy(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    @property
    def is_stalled(self) -> bool:
        """Whether the current step has taken longer than `EngineLimits.stalled_s`."""
        started = self._step_started
        return started is not None and time.monotonic() - started > self.limits.stalled_s

    def submit(self, *jobs: Job) -> None:
        """Put jobs into the queue, all or none, from their event loop; raise `QueueFullError` if it has no room."""
        with self._changed:
            if not self.is_healthy:
                raise UnavailableError("the server is stopping; try again when it is back")
            self.cancel_ahead()
            for job in [job for job in self._waiting if job.cancelled.is_set()]:
                self._waiting.remove(job)
                job.session_result.put_nowait(SessionResult())
            if len(self._waiting) + len(jobs) > self.limits.queue:
                raise QueueFullError(f"{self.limits.queue} requests are waiting, the limit; try again later")
            self._waiting.extend(jobs)
            self.metrics.waiting.set(len(self._waiting))
            self._changed.notify()

    @property
    def is_busy(self) -> bool:
        """Whether jobs run or wait; those that are cancelled do not count."""
        running = [*self._running.values(), *self._suspended]
        return bool(self._waiting) or any(not other.job.cancelled.is_set() for other in running)

    def count_stored(self, ids: list[int]) -> int:
        """Return how many first tokens of a prompt are stored; any thread may ask."""
        return self._stored_prompts.longest(ids)

    def cancel_ahead(self) -> None:
        """Cancel what is prefilled ahead."""
        if self._job_ahead is not None:
            self._job_ahead.cancelled.set()

    def prefill_ahead(self, job: Job) -> None:
        """Run a job that only prefills, unless others run. Any later job cancels it."""
        with self._changed:
            if self.is_healthy and not self.is_busy:
                self._job_ahead = job
                self._waiting.append(job)
                self._changed.notify()

    async def clear_stored_prompts(self) -> None:
        """Remove the prompts in memory; return when that is done."""
        cleared = asyncio.Event()
        with self._changed:
            if not self.is_healthy:
                return
            self._clear_requests.append(cleared)
            self._changed.notify()
        await cleared.wait()

    def estimate(self, ids: list[int]) -> dict[str, Any]:
        """Return how many tokens of a prompt are stored, and the seconds to prefill the others alone.

        The seconds follow from the latest steps; None before the first.
        """
        cached = self._stored_prompts.longest(ids)
        seconds = (len(ids) - cached) * self._prefill_seconds / self._prefilled if self._prefilled else None
        return {"cached_tokens": cached, "prefill_seconds": None if seconds is None else round(seconds, 3)}

    def status(self) -> dict[str, Any]:
        """Return what runs, as last measured, and what waits, and why."""
        with self._changed:
            waiting, reason = list(self._waiting), self._blocked_reason
        reasons = [reason or "the current step", *["an earlier request waits"] * len(waiting)]
        return {
            "running": self._jobs,
            "waiting": [
                {"prompt_tokens": len(job.prompt.ids), "why": why} for job, why in zip(waiting, reasons, strict=False)
            ],
        }

    def cancel(self, job: Job) -> None:
        """Cancel a job and the other answers to its prompt; running ones are removed before the next token."""
        for answer in job.answers:
            answer.cancelled.set()

    # The thread.

    def _run(self) -> None:
        try:
            self.serve()
        except Exception as error:
            if not self._ranks.is_alone:  # the others wait for this one
                end_rank("server", error)
            log.exception("the engine has ended")
            raise
        finally:
            # A join returns before a thread's own storage is freed. mlx keeps streams there, and a program that ends
            # meanwhile is aborted.
            mx.clear_streams()

    def serve(self) -> None:
        """Run in this thread until `stop`; ranks other than the first follow the first one's orders."""
        mx.random.seed(self._ranks.broadcast(lambda: secrets.randbits(63)))  # else all threads draw the same numbers
        with compressed(self._model, self._config):
            self._open_batch()
            try:
                while (orders := self._update_batch()).keep_running:
                    self._step(prefills=orders.prefills)
            finally:
                self.stop()  # nothing is added to the queue after this
                begun = [*self._running.values(), *self._suspended]
                running = [job for other in begun for job in (other.job, *other.followers)]
                for job in (*running, *self._waiting):
                    self._fail(job, UnavailableError("the server is stopping"))
                self._send_events()
                self._report_cleared()
                self._store_running()
                self._batch.close()
                self._stay_awake.end()
                self._stored_prompts.memory.trim_to(0)

    def _make_caches(self) -> list[Any]:
        return native_caches(self._model) if self._plan is None else build_caches(self._plan)

    def _open_batch(self) -> None:
        self._recorded_model = RecordedModel(self._model)
        self._batch = BatchGenerator(
            self._recorded_model,
            completion_batch_size=self.limits.concurrency,
            prefill_batch_size=min(self.limits.prompt_concurrency, self.limits.concurrency),
            prefill_step_size=self.limits.prefill_grid.first,
            stream=mx.default_stream(mx.default_device()) if self._ranks.is_alone else None,
        )
        self._batch_size = self._batch.completion_batch_size
        decoder = self._model if self.limits.batches else OneRowModel(self._model)
        self._batch._generation_batch = DraftingBatch.begin(decoder, self._drafter, self._count_drafts)

    def _count_drafts(self, drafted: int, accepted: int) -> None:
        self.metrics.drafted_tokens.inc(drafted)
        self.metrics.accepted_tokens.inc(accepted)

    def _report_cleared(self) -> None:
        with self._changed:
            cleared, self._clear_requests = self._clear_requests, []
        for event in cleared:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(event.set)

    def _emit(self, job: Job, *events: Event | SessionResult) -> None:
        self._events += [(job, event) for event in events]

    def _send_events(self) -> None:
        """Deliver the events of a step to the event loop in one call."""
        events, self._events = self._events, []

        def deliver() -> None:
            for job, event in events:
                if isinstance(event, SessionResult):
                    job.session_result.put_nowait(event)
                else:
                    job.events.put_nowait(event)

        if events and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(deliver)

    # Before a step: jobs are removed and admitted, as the first rank decides.

    def _update_batch(self) -> Orders:
        """Remove and admit jobs as the first rank orders; return its orders."""
        if is_idle := not (self._waiting or self._running):
            self._stay_awake.end()
        orders = self._broadcast.share(self._decide, idle=is_idle)
        self._stay_awake.begin()
        with self._on_error("the batch failed", self._fail_batch):
            self._remove(orders)
        self._resume_suspended()
        for job in orders.admitted:
            self._admit(job)
        if orders.stored_prompt_bytes is not None:
            self._stored_prompts.memory.trim_to(orders.stored_prompt_bytes)
            if orders.stored_prompt_bytes == 0:
                self._report_cleared()
        return orders

    def _decide(self) -> Orders:
        """Wait until there is work; return which jobs to remove and which to admit."""
        with self._changed:
            while not (self._stopping or self._waiting or self._running or self._suspended or self._clear_requests):
                self._step_started = None
                self._changed.wait()
            self._step_started = time.monotonic()
            if self._stopping:
                return Orders(keep_running=False)
            finished, self._finished = self._finished, []
            failed = [uid for uid, job in self._running.items() if job.failed]
            leaving = {*finished, *failed}
            cancelled = [u for u, job in self._running.items() if job.job.cancelled.is_set() and u not in leaving]
            leaving.update(cancelled)
            remaining = [job for uid, job in self._running.items() if uid not in leaving]
            joining = [job for uid in leaving for job in self._running[uid].followers]
            num_orphans = len(joining)
            self._blocked_reason = "an answer waits to go on after a memory error" if self._suspended else None
            while self._waiting and not self._suspended:
                job = self._waiting[0]
                if job.cancelled.is_set():
                    self._emit(job, SessionResult())
                    self._waiting.popleft()
                    continue
                with self._fail_on_admission_error(job):
                    self._blocked_reason = self._admission.blocked_reason(job, remaining, joining)
                    if self._blocked_reason is not None:
                        break
                    joining.append(job)
                self._waiting.popleft()
            self.metrics.waiting.set(len(self._waiting))
            is_cleared = bool(self._clear_requests)
        room = self._admission.room_for_stored_prompts(remaining, joining)
        if is_cleared:
            room = 0
        prefills = self._decode_share.may_prefill(decodes=any(job.is_decoding for job in remaining))
        return Orders(joining[num_orphans:], finished, cancelled, failed, room, prefills)

    def _remove(self, orders: Orders) -> None:
        """Remove jobs from the batch and store their caches, unless they failed."""
        leaving = [*orders.finished, *orders.cancelled, *orders.failed]
        if not leaving:
            return
        extracted = {}
        for uid in (*orders.finished, *orders.cancelled):
            with self._fail_job_on_error(uid):
                if self._running[uid].has_progress:
                    extracted[uid] = self._extract(uid)
        self._batch.remove(leaving)
        removed = [self._running[uid] for uid in leaving]
        for uid, running in zip(leaving, removed, strict=True):
            with self._fail_job_on_error(uid):
                caches, tokens = extracted.get(uid, (None, []))
                if running.job.session is not None and uid in orders.cancelled:
                    if caches is not None:
                        self._store_on_disk(running, tokens, caches)
                    self._emit(running.job, SessionResult())  # half an answer: the session stays as it was
                elif caches is not None and tokens:
                    self._store_answer(running, tokens, caches)
            self._forget(uid)
        for follower in [job for running in removed for job in running.followers]:
            self._admit(follower)

    def _admit(self, job: Job) -> None:
        with self._fail_on_admission_error(job):
            question = self._recall.question(job)
            self._begin(job, question, self._stored_prompts.find(job, max(1, len(question))))

    def _begin(self, job: Job, question: list[int], source: PromptSource) -> None:
        """Insert a job into the batch, or let it follow one that prefills the prefix that both share."""
        leader = self._admission.find_leader(job, source.cached_tokens, self._running.values())
        if leader is not None:
            leader[0].followers[job] = leader[1]
            return
        caches, cached_tokens, stored = source.caches, source.cached_tokens, source.stored
        if caches is None and cached_tokens and stored is not None:
            caches, cached_tokens = stored.restore(), stored.restored
        self._ranks.check_equal("the cached prompts", np.array([cached_tokens, self._stored_prompts.memory.nbytes]))
        segments = job.prompt.remaining_segments(cached_tokens)
        running = self._new_running(job, cached_tokens, stored)
        if job.session is None:  # a session stores its own caches
            running.segment_ends = segment_ends(segments, cached_tokens)
        if not job.continues_session:
            running.shared = self._admission.shared_rows(job, caches)
        if question:
            segments, caches = self._recall.split_question(running, question, segments, caches)
        self._insert(running, segments, caches, job.prompt.ids[:cached_tokens])
        self._emit(job, Started(cached_tokens))
        if running.quotation.ids:
            self._emit(job, Quoted(len(running.quotation.ids)))
        if not job.only_prefills:
            self.metrics.prompt_tokens.inc(len(running.prompt_ids))
            self.metrics.cached_tokens.inc(cached_tokens)
            self.metrics.restored_tokens.inc(0 if stored is None else stored.restored)

    def _new_running(self, job: Job, cached_tokens: int, stored: CachedPrompt | None = None) -> RunningJob:
        sampler = self._samplers.get(id(job.sampler))
        if sampler is None:
            # mlx-lm samples rows that have the same sampler together, so jobs that share a sampler share its guard.
            sampler = self._samplers[id(job.sampler)] = ErrorGuard(job.sampler, partial(mx.argmax, axis=-1))
        return RunningJob(next(self._numbers), job, cached_tokens, self._tokenizer.detokenizer, sampler, stored)

    def _insert(
        self, running: RunningJob, segments: list[list[int]], caches: list[Any] | None, tokens: list[int]
    ) -> None:
        """Add a job whose `caches` hold `tokens`; with the other answers, if only the last token remains."""
        together = [running]
        if sum(map(len, segments)) == 1:
            together += self._take_others(running)
        for answer in together:
            answer.step_ends = self.limits.prefill_grid.ends(segments, len(tokens))
            answer.held = HeldCaches(caches, list(tokens))  # mlx-lm extends the lists of its batch
            self._running[-next(self._numbers)] = answer

    def _choose_prompts(self) -> None:
        """Let mlx-lm's batch have the prompts that the next prefill step is for, and no others."""
        waiting = {key: running for key, running in self._running.items() if not running.is_decoding}
        prompts = [
            PromptToPrefill(
                key, running.num_remaining, running.next_step, self.limits.prefill_grid.step(running.prefilled)
            )
            for key, running in sorted(waiting.items(), key=lambda item: item[1].number)
        ]
        chosen = self._prefill_order.choose(prompts)
        for key, running in waiting.items():
            if key not in chosen and running.held is None:
                with self._fail_job_on_error(key):
                    caches, tokens = self._extract(key)
                    caches = [with_trimmed_windows(cache) for cache in caches]
                    mx.eval(all_arrays(caches))  # else they keep the batch's arrays
                    running.held = HeldCaches(caches, tokens)
                    self._batch.remove([key])
                    del self._running[key]
                    self._running[-next(self._numbers)] = running
        for key in chosen:
            if (held := waiting[key].held) is not None:
                with self._on_error("a request could not join the batch", partial(self._fail_held, key)):
                    self._move_into_batch(key, held)

    def _fail_held(self, key: int, error: Exception) -> None:
        running = self._running.pop(key)
        running.close_stored()
        self._fail(running.job, _not_started(error))
        self._admit_followers([running])

    def _move_into_batch(self, key: int, held: HeldCaches) -> None:
        running, (caches, tokens) = self._running[key], held
        (uid,) = self._batch.insert_segments(
            segments=[running.remaining_steps],
            max_tokens=[running.job.max_tokens - running.generated],
            caches=[caches if self.limits.batches else list(map(OneRow, caches or self._make_caches()))],
            all_tokens=[list(tokens)],
            samplers=[self._ranks.share_sampler(running.sampler)],
            logits_processors=[running.processors],
            stop_sequences=[self._stop_sequences],
        )
        del self._running[key]
        self._running[uid], running.held = running, None

    def _take_others(self, running: RunningJob) -> list[RunningJob]:
        """Return the other answers to a prompt that is prefilled except for its last token."""
        num_prefilled, others = len(running.prompt_ids) - 1, []
        for job in running.pending:
            stored = self._stored_prompts.continued(job, None, num_prefilled).stored
            others.append(self._new_running(job, num_prefilled, stored))
            others[-1].recalled = running.recalled
        running.pending = []
        return others

    # A step: one token for each job that decodes, one prefill step for the others.

    def _step(self, *, prefills: bool) -> None:
        errors: list[Exception] = []
        with self._on_error("a step of the batch failed", errors.append):
            decoding, started = any(job.is_decoding for job in self._running.values()), time.monotonic()
            if prefills:
                self._choose_prompts()
            self._batch.completion_batch_size = self._batch_size if prefills else 0  # mlx-lm then only decodes
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            prefilled, generated = self._batch.next()
            taken = mx.get_peak_memory() - max(before, mx.get_active_memory())
            seconds = time.monotonic() - started
            self._decode_share.count(seconds, prefilled=bool(prefilled), decoded=decoding)
            if prefilled and not decoding:
                self._prefilled *= _EARLIER_STEPS
                self._prefill_seconds = _EARLIER_STEPS * self._prefill_seconds + seconds
            self._after_prefill(prefilled, self._recorded_model.passes, taken, decodes=decoding)
            for response in generated:
                with self._fail_job_on_error(response.uid):
                    self._process_token(self._running[response.uid], response)
                if response.finish_reason is not None:
                    self._forget(response.uid)
            self.metrics.generated_tokens.inc(len(generated))
            self._fail_jobs_with_sampling_errors()
        if errors:
            self._recover_batch(errors[0])
        self._recorded_model.passes.clear()
        self._measure()
        self._send_events()

    def _after_prefill(self, responses: list[Any], passes: list[list[Any]], taken: int, *, decodes: bool) -> None:
        """Process prefill responses. The first of the passes is of the jobs that begin their answers, if any do.

        The step took `taken` bytes for a moment; `decodes` is whether other jobs decoded in it.
        """
        begun, steps = 0, []
        for response in responses:
            running, (done, total) = self._running[response.uid], response.progress
            before, running.prefilled = running.prefilled, len(running.prompt_ids) - total + done
            steps.append((running.prefilled, running.prefilled - before))
            self.metrics.prefill_tokens.inc(running.prefilled - before)
            self._prefilled += 0 if decodes else running.prefilled - before
            cached = running.cached_tokens
            self._emit(running.job, PrefillProgress(running.prefilled - cached, len(running.prompt_ids) - cached))
            if response.end_of_prompt:
                with self._fail_job_on_error(response.uid):
                    self._recall.begin_answer(running, batch_row(passes[0], begun))
                begun += 1
        if self.memory_need is not None and steps:
            tokens, step = map(max, zip(*steps, strict=True))
            self.memory_need.note_step(tokens, step, len(steps), taken)
        for response in responses:
            with self._fail_job_on_error(response.uid):
                self._use_prefilled(response)

    def _use_prefilled(self, response: Any) -> None:
        """Store what a job has prefilled, let others continue from it, and recall before the question."""
        uid, running = response.uid, self._running[response.uid]
        num_remaining, prefilled, stored = running.num_remaining, running.prefilled, running.stored
        extracted = cache(partial(self._extract, uid))  # once: states and windows are copied out of the batch
        is_at_question = running.question and num_remaining == len(running.question)
        is_segment_end = prefilled in running.segment_ends
        is_end = is_segment_end or num_remaining == 1
        if (
            stored is not None
            and self._is_due(prefilled, stored.last_checkpoint, is_end)
            and stored.can_store(prefilled)
        ):
            stored.store(running.prompt_ids[:prefilled], extracted().caches)
        if any(stop <= running.prefilled for stop in running.followers.values()):
            self._release_followers(running, extracted().caches)
        is_grid_point = (
            self._states is not None
            and bool(running.segment_ends)
            and self._is_due(prefilled, running.stored_in_memory)
        )
        if (is_segment_end or is_grid_point) and not response.end_of_prompt:
            caches, tokens = extracted()
            running.shared, running.stored_in_memory = self._admission.shared_rows(running.job, caches), prefilled
            self._stored_prompts.insert(tokens, caches, stored)
        if is_at_question:
            self._recall_for_question(uid, running)
        if num_remaining == 1 and running.job.only_prefills:
            self._finished.append(uid)
        if num_remaining == 1 and running.pending and uid in self._running:
            caches, tokens = self._extract(uid)
            for other in self._take_others(running):
                self._insert(other, [running.prompt_ids[-1:]], caches, tokens)

    def _is_due(self, tokens: int, stored: int, is_end: bool = False) -> bool:
        """Return whether to store a prompt after `tokens` tokens, if it was last stored after `stored`."""
        if is_end:
            return tokens - stored >= MIN_STORED
        return tokens - stored >= STORED_STEP if self._states is None else self._states.is_due(tokens, stored)

    def _extract(self, uid: int) -> HeldCaches:
        """Return the caches of a job in the batch or out of it, None if nothing is prefilled, and their tokens."""
        held = self._running[uid].held
        return HeldCaches(*self._batch.extract_cache([uid])[uid]) if held is None else held

    def _release_followers(self, running: RunningJob, caches: list[Any]) -> None:
        """Let followers whose shared prefix is prefilled continue from copies of the leader's caches."""
        running.shared = self._admission.shared_rows(running.job, caches)
        if running.stored is not None:
            running.stored.mark(caches)
        followers, running.followers = running.followers, {}
        for job, stop in followers.items():
            if stop > running.prefilled:
                running.followers[job] = stop
            elif stop < running.prefilled:
                self._admit(job)
            else:
                with self._fail_on_admission_error(job):
                    self._begin(job, [], self._stored_prompts.continued(job, caches, stop))

    def _recall_for_question(self, uid: int, running: RunningJob) -> None:
        """Recall evicted tokens before the question, which alone remains of the prompt, and insert the job again."""
        caches, tokens = self._extract(uid)
        if not (running.job.continues_session or evict_before_question(caches, len(running.question))):
            running.question = []
            return
        question = self._recall.before_question(running, caches)
        self._insert(running, [question], caches, tokens)
        self._batch.remove([uid])
        del self._running[uid]
        self.metrics.prompt_tokens.inc(len(running.quotation.ids))
        if running.quotation.ids:
            self._emit(running.job, Quoted(len(running.quotation.ids)))

    def _process_token(self, running: RunningJob, response: Any) -> None:
        finish_reason = response.finish_reason
        # All ranks search, even for a job that will end.
        if finish_reason is None and running.decode_recall is not None:
            running.decode_recall.count_token()
        event = running.next_event(response)
        if isinstance(event, Piece) and event.recalled is not None:
            self.metrics.recalled_tokens.inc(len(event.recalled.positions))
        if finish_reason is not None or (isinstance(event, Piece) and event.finish_reason is not None):
            self._log_first_run(len(running.job.prompt.ids))
        if finish_reason is not None:
            self._emit(running.job, event)
            self._store_answer(running, response.all_tokens, response.prompt_cache)
        elif isinstance(event, ApiError):
            self._report_failure(running, event)
        else:
            self._emit(running.job, event)
            if event.finish_reason is not None:
                self._finished.append(response.uid)

    def _log_first_run(self, tokens: int) -> None:
        """Log, once, what really ran for an answer to a prompt of `tokens` tokens."""
        if self._plan is not None and not self._has_logged_run:
            log.info("the first answer %s", RunSummary.of(self._plan, tokens))
            self._has_logged_run = True

    def _store_answer(self, running: RunningJob, tokens: list[int], caches: list[Any]) -> None:
        """Store the caches of an answer: for its session, or for prompts that share the prefix."""
        job = running.job
        self._store_on_disk(running, tokens, caches)
        if job.session is None:
            self._stored_prompts.insert(tokens, caches, running.stored)
            return
        release(caches)  # evicts recalled rows again
        stats, registered = cache_stats(caches, self._plan), self._broadcast.register(caches)
        registered.tokens = np.array(tokens, np.int64)
        recalled, quotation = running.total_recalled, running.quotation
        self._emit(job, SessionResult(registered, list(tokens), stats, recalled, quotation, running.quotation_start))

    def _store_on_disk(self, running: RunningJob, tokens: list[int], caches: list[Any]) -> None:
        """Store caches of prompt and answer, unless less than `MIN_STORED` tokens of them are not stored yet."""
        stored = running.stored
        if stored is not None and len(tokens) - stored.last_checkpoint >= MIN_STORED:
            stored.store(tokens, caches)

    def _store_running(self) -> None:
        """Store on disk what running jobs have prefilled and generated; the server is stopping."""
        for uid, running in self._running.items():
            if running.stored is not None and running.has_progress and not running.failed:
                with self._on_error("an answer could not be stored", lambda _: None):
                    caches, tokens = self._extract(uid)
                    self._store_on_disk(running, tokens, caches)
                    running.stored.close()

    # Errors: of one job, of the whole batch, and of a job that cannot join it.

    def _fail(self, job: Job, error: ApiError) -> None:
        self._emit(job, error, SessionResult())

    def _report_failure(self, running: RunningJob, error: ApiError) -> None:
        """Send an error to the client; the job is removed before the next step."""
        if not running.failed:
            running.failed = True
            self._emit(running.job, error)

    def _forget(self, uid: int) -> None:
        """Forget a job that is out of the batch. If it failed, release its session unchanged."""
        running = self._running.pop(uid)
        running.close_stored()
        if running.failed:
            self._emit(running.job, SessionResult())

    @contextmanager
    def _on_error(self, event: str, handle: Callable[[Exception], None]) -> Iterator[None]:
        """Log and handle an error of the body. With several ranks, re-raise: the others may not have failed."""
        try:
            yield
        except Exception as error:
            if not self._ranks.is_alone:
                raise
            log.exception(event)
            handle(error)

    def _fail_job_on_error(self, uid: int) -> AbstractContextManager[None]:
        running = self._running[uid]
        return self._on_error("a job failed", lambda error: self._report_failure(running, _model_failed(error)))

    def _fail_on_admission_error(self, job: Job) -> AbstractContextManager[None]:
        def fail(error: Exception) -> None:
            self._fail(job, _not_started(error))

        return self._on_error("a request could not join the batch", fail)

    def _reopen_batch(self) -> list[RunningJob]:
        """Open a new batch, as the state of the old one is unknown; return its jobs, and keep those held outside."""
        begun = [running for running in self._running.values() if running.held is None]
        self._running = {key: running for key, running in self._running.items() if running.held is not None}
        self._finished.clear()
        self._batch.close()
        self._open_batch()
        return begun

    def _admit_followers(self, leaders: list[RunningJob]) -> None:
        for leader in leaders:
            followers, leader.followers = leader.followers, {}
            for follower in followers:
                self._admit(follower)

    def _fail_batch(self, error: Exception) -> None:
        """Fail all running jobs, and open a new batch."""
        failed = self._reopen_batch()
        for running in failed:
            self._fail(running.job, _model_failed(error))
        self._admit_followers(failed)

    def _recover_batch(self, error: Exception) -> None:
        """Fail all running jobs; after a memory error, go on with all but the largest, which waits until one ends."""
        in_batch = [(uid, job) for uid, job in self._running.items() if job.held is None]
        resumed = [job for uid, job in in_batch if uid not in self._finished and not job.failed]
        evicts = self._plan is not None and self._plan.eviction is not None
        is_alone = not resumed or len(self._running) - len(in_batch) + len(resumed) < 2
        if not is_out_of_memory(error) or is_alone or evicts or not all(job.can_resume for job in resumed):
            self._fail_batch(error)
            return
        self._recorded_model.passes.clear()
        traceback.clear_frames(error.__traceback__)  # like the passes, they hold arrays of the failed step
        begun = self._reopen_batch()
        self._stored_prompts.memory.trim_to(0)
        mx.clear_cache()
        largest = max(resumed, key=lambda job: len(job.job.prompt.ids) + job.generated)
        for job in begun:
            if job not in resumed:  # its client has the answer, or an error
                self._emit(job.job, SessionResult())
            elif job is not largest:
                self._resume(job)
        largest.restored_checkpoint = None  # which holds rows
        self._suspended.append(largest)
        self._resume_below = len(self._running)
        self._admit_followers(begun)

    def _resume_suspended(self) -> None:
        """Go on with a job that waits since a memory error, once fewer others run."""
        self._suspended = [job for job in self._suspended if not job.job.cancelled.is_set()]
        if self._suspended and len(self._running) < max(1, self._resume_below):
            self._resume(self._suspended.pop())
            self._resume_below = len(self._running)

    def _resume(self, running: RunningJob) -> None:
        self._insert(running, [running.resume()], None, [])
        running.stored = self._stored_prompts.continued(running.job, None, 0).stored

    def _fail_jobs_with_sampling_errors(self) -> None:
        for uid, running in self._running.items():
            guards = (running.sampler, *running.processors) if running.is_decoding else ()  # else another job's error
            error = next((guard.error for guard in guards if guard.error is not None), None)
            if error is not None and uid not in self._finished:
                log.error("sampling failed", exc_info=error)
                self._report_failure(running, ModelFailedError(f"sampling failed: {error}"))
        for running in self._running.values():
            running.sampler.error = None

    def _measure(self) -> None:
        if self._running and time.monotonic() - self._measured_at < self.limits.metrics_interval_s:
            return
        self._measured_at = time.monotonic()
        tokens = [running.prefilled + running.generated - running.resumed for running in self._running.values()]
        self._jobs = [running.describe() for running in self._running.values()]
        held = self._batch.prompt_cache_nbytes + sum(running.held_nbytes for running in self._running.values())
        self.metrics.running.set(len(self._running))
        self.metrics.kv_bytes.set(held)
        self.metrics.kv_native_bytes.set(held if self._native_nbytes is None else sum(map(self._native_nbytes, tokens)))
        self.metrics.prompt_cache_bytes.set(self._stored_prompts.memory.nbytes)
        self.metrics.prompt_cache_entries.set(len(self._stored_prompts.memory))


def _model_failed(error: Exception) -> ModelFailedError:
    return ModelFailedError(f"the model failed: {error}")


def _not_started(error: Exception) -> ModelFailedError:
    return ModelFailedError(f"the request could not be started: {error}")
