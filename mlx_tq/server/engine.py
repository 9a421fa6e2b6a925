"""The thread that generates: mlx-lm's batch generator over compressed caches, fed from a bounded queue."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from threading import Condition, Thread
from typing import Any
from weakref import WeakValueDictionary

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator, make_stop_sequences

from mlx_tq.cli.frame import end_rank
from mlx_tq.config import KVConfig
from mlx_tq.models import ranks_of
from mlx_tq.prefix_cache.prefix_cache import CachedPrompt, PrefixCache
from mlx_tq.prompt_cache.compressed import compressed
from mlx_tq.prompt_cache.plan import Plan
from mlx_tq.server.asking import Asking
from mlx_tq.server.beginnings import Beginnings, answers, jobs_of
from mlx_tq.server.errors import ApiError, ModelFailedError, QueueFullError, UnavailableError
from mlx_tq.server.guarded_sampling import GuardedSampler
from mlx_tq.server.held import what_is_held
from mlx_tq.server.jobs import Failed, Job, Left, Piece, Progress, Quoted, Started
from mlx_tq.server.kept_prompts import KeptPrompts
from mlx_tq.server.limits import EngineLimits, Kept
from mlx_tq.server.metrics import Metrics
from mlx_tq.server.orders import Following, Orders
from mlx_tq.server.outbox import Outbox
from mlx_tq.server.prefixes import Source, going_on, is_worth_storing, stored_prompt
from mlx_tq.server.running import Running, rest_of
from mlx_tq.session.bring_back import hold
from mlx_tq.session.recall import ready_to_recall, release

log = logging.getLogger(__name__)

_MEASURE_S = 0.1  # between two measurements of a batch that stays the same; each reads the size of every array


class Engine:
    """Generates answers for jobs.

    Args:
        model, tokenizer: of mlx-lm.
        config: how caches are stored.
        plan: the same for this model; None where nothing is compressed.
        limits: see `EngineLimits`.
        metrics: counts what happens.
        kept: what else takes memory.
        store: of prefixes, of the same plan.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        config: KVConfig,
        plan: Plan | None,
        limits: EngineLimits,
        metrics: Metrics,
        kept: Kept | None = None,
        store: PrefixCache | None = None,
    ) -> None:
        self._model, self._tokenizer, self._config, self._plan = model, tokenizer, config, plan
        self._ranks = ranks_of(model)
        self._following = Following(self._ranks)
        self._limits, self._metrics, self._kept, self._store = limits, metrics, kept, store
        self._waiting: deque[Job] = deque()
        self._changed = Condition()  # guards what is waiting and whether to stop
        self._stopping = False
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        # The engine's thread alone uses what follows.
        self._running: dict[int, Running] = {}
        self._outbox = Outbox()
        self._ended: list[int] = []  # of the running ones, those that leave before the next step
        self._stop_sequences = make_stop_sequences(tokenizer)
        self._kept_prompts = KeptPrompts(limits.prompt_cache_size, limits.prompt_cache_bytes)
        self._beginnings = Beginnings(plan, limits.prefill_step_size)
        self._samplers: MutableMapping[int, GuardedSampler] = WeakValueDictionary()  # keyed by id(job.sampler)
        self._asking = Asking(model, tokenizer, plan, limits.prefill_step_size)
        self._measured = 0.0
        self._step_began: float | None = None  # None while idle

    # For the web side.

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin; events of jobs are delivered on `loop`."""
        self._outbox.loop = loop
        self._thread.start()

    def follow(self) -> None:
        """Do what the engine of the first rank does, until that ends.

        Raises:
            MlxTqError: what ended it here, or on all ranks.
        """
        self._serve()

    def stop(self) -> None:
        """End the answers in progress with an error, and take no more jobs. Returns at once."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def join(self, timeout: float) -> None:
        """Wait for the thread to end."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join(timeout)

    @property
    def concurrency(self) -> int:
        """Answers that are generated at once."""
        return self._limits.concurrency

    @property
    def is_healthy(self) -> bool:
        """Whether jobs are taken."""
        return self._thread.is_alive() and not self._stopping

    @property
    def is_stalled(self) -> bool:
        """Whether the current step exceeds `stalled_s`."""
        began = self._step_began
        return began is not None and time.monotonic() - began > self._limits.stalled_s

    def submit(self, *jobs: Job) -> None:
        """Put jobs into the queue, all or none.

        Raises:
            QueueFullError: as many wait as may.
            UnavailableError: the engine is stopping.
        """
        with self._changed:
            if not self.is_healthy:
                raise UnavailableError("the server is stopping; try again when it is back")
            for waiting in [waiting for waiting in self._waiting if waiting.cancelled]:
                self._waiting.remove(waiting)
                waiting.left.put_nowait(Left())
            if len(self._waiting) + len(jobs) > self._limits.queue:
                raise QueueFullError(f"{self._limits.queue} requests are waiting, the limit; try again later")
            self._waiting.extend(jobs)
            self._metrics.waiting.set(len(self._waiting))
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Stop generating for a job, if it still runs: with its others it leaves the batch before the next token."""
        for each in (job, *job.others):
            each.cancelled = True

    # The thread.

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            if not self._ranks.is_alone:  # the others wait for this one
                end_rank("server", error)
            log.exception("the engine has ended")
            raise
        finally:
            # A join returns before a thread's own storage is freed. mlx keeps streams there, and a program that ends
            # meanwhile is aborted.
            mx.clear_streams()

    def _serve(self) -> None:
        with compressed(self._model, self._config):
            self._batch = self._new_batch()
            try:
                while self._take():
                    self._step()
            finally:
                with self._changed:
                    self._stopping = True
                    jobs = [*jobs_of(self._running.values()), *self._waiting]
                    self._waiting.clear()
                for job in jobs:
                    self._fail(job, UnavailableError("the server is stopping"))
                self._outbox.send()
                self._batch.close()
                self._kept_prompts.clear()

    def _new_batch(self) -> BatchGenerator:
        return BatchGenerator(
            self._model,
            completion_batch_size=self._limits.concurrency,
            prefill_batch_size=min(self._limits.prompt_concurrency, self._limits.concurrency),
            prefill_step_size=self._limits.prefill_step_size,
            stream=mx.default_stream(mx.default_device()) if self._ranks.is_alone else None,
        )

    def _take(self) -> bool:
        """Let answers leave the batch and jobs join it, as the first rank decides; False ends the thread."""
        orders = self._following.told(self._decide, idle=not (self._waiting or self._running))
        with self._fail_batch_on_error():
            self._remove(orders)
        for job in orders.admitted:
            self._admit(job)
        if orders.room is not None:
            self._kept_prompts.trim_to(orders.room)
        return orders.goes_on

    def _decide(self) -> Orders:
        """What is to be done, once there is something."""
        with self._changed:
            while not (self._stopping or self._waiting or self._running):
                self._step_began = None
                self._changed.wait()
            self._step_began = time.monotonic()
            if self._stopping:
                return Orders(goes_on=False)
            ended, self._ended = self._ended, []
            failed = [uid for uid, running in self._running.items() if running.failed]
            leaving = {*ended, *failed}
            abandoned = [uid for uid, running in self._running.items() if running.job.cancelled and uid not in leaving]
            leaving.update(abandoned)
            remaining = [running for uid, running in self._running.items() if uid not in leaving]
            orphans = [job for uid in leaving for job, _ in self._running[uid].followers]
            admitted: list[Job] = []
            while self._waiting:
                job = self._waiting[0]
                with self._admitting(job):
                    if not self._fits(remaining, [*orphans, *admitted]):
                        break
                    if job.cancelled:
                        self._outbox.put((job, Left()))
                    else:
                        admitted.append(job)
                self._waiting.popleft()
            self._metrics.waiting.set(len(self._waiting))
        return Orders(admitted, ended, abandoned, failed, self._room(remaining, [*orphans, *admitted]))

    def _fail(self, job: Job, error: ApiError) -> None:
        self._outbox.put((job, Failed(error)), (job, Left()))

    def _fits(self, running: list[Running], admitted: list[Job]) -> bool:
        """The first waiting job can join those that run; alone it always can, which was checked when it came."""
        job = self._waiting[0]
        if not running and not admitted:
            return True
        if sum(1 + len(each.others) for each in (*admitted, job)) + answers(running) > self._limits.concurrency:
            return False
        if self._limits.memory is None:
            return True
        room = self._limits.memory - self._beginnings.reserved(running, (*admitted, job))
        return room >= 0 or (not admitted and self._in_common(job, -room, running) >= -room)

    def _room(self, running: list[Running], admitted: list[Job]) -> int | None:
        """Bytes that are left beside all answers, for caches kept for later requests; sessions make room first."""
        if self._limits.memory is None or not admitted:
            return None
        room = self._limits.memory - self._beginnings.reserved(running, admitted)
        if self._kept is not None:
            self._kept.trim_to(room)
            room -= self._kept.nbytes
        return max(0, room)

    def _in_common(self, job: Job, least: int, running: list[Running]) -> int:
        """Bytes of a waiting job that running ones hold already, or will; 0 where they cannot be `least`."""
        if job.goes_on or self._beginnings.saved(job, len(job.prompt.ids)) < least:
            return 0
        caches, cached, stored = self._source(job, 1, alone=True)
        leader = self._beginnings.leader(job, cached, running)
        if leader is not None:
            return self._beginnings.saved(job, leader[1])
        return self._beginnings.held(job, caches if stored is None else stored.live_caches, running)

    def _admit(self, job: Job) -> None:
        """Let a job join the batch, or wait for one there that reads what both begin with."""
        with self._admitting(job):
            question = self._asking.question(job)
            self._begin(job, question, *self._source(job, max(1, len(question))))

    def _report_failure(self, running: Running, error: ApiError) -> None:
        """Send the error to the client. The job leaves the batch before the next step."""
        if not running.failed:
            running.failed = True
            self._outbox.put((running.job, Failed(error)))

    def _drop_running(self, uid: int) -> None:
        """Drop a job that is out of the batch. If it failed, also release its session unchanged."""
        running = self._running.pop(uid)
        if running.failed:
            self._outbox.put((running.job, Left()))

    @contextmanager
    def _fail_job_on_error(self, uid: int) -> Iterator[None]:
        """Fail only this job if the body raises. With several ranks, re-raise: the others may not have failed."""
        running = self._running[uid]
        try:
            yield
        except Exception as error:
            if not self._ranks.is_alone:
                raise
            log.exception("a job failed")
            self._report_failure(running, ModelFailedError(f"the model failed: {error}"))

    @contextmanager
    def _fail_batch_on_error(self) -> Iterator[None]:
        """Fail all running jobs if the body raises, because the state of the batch is then unknown."""
        try:
            yield
        except Exception as error:
            if not self._ranks.is_alone:
                raise
            log.exception("a step of the batch failed")
            failed, self._running = self._running, {}
            for running in failed.values():
                self._fail(running.job, ModelFailedError(f"the model failed: {error}"))
            self._ended.clear()
            self._batch.close()
            self._batch = self._new_batch()
            self._admit_followers(failed.values())

    @contextmanager
    def _admitting(self, job: Job) -> Iterator[None]:
        """If a job cannot join the batch, it fails alone."""
        try:
            yield
        except Exception as error:
            if not self._ranks.is_alone:
                raise
            log.exception("a request could not join the batch")
            self._fail(job, ModelFailedError(f"the request could not be begun: {error}"))

    def _begin(
        self, job: Job, question: list[int], caches: list[Any] | None, cached: int, stored: CachedPrompt | None
    ) -> None:
        """Let a job go on from caches of its first `cached` tokens, or from the store, which has these."""
        leader = self._beginnings.leader(job, cached, self._running.values())
        if leader is not None:
            leader[0].followers.append((job, leader[1]))
            return
        if caches is None and stored is not None:
            caches, cached = stored.restore(), stored.restored
        self._ranks.check_equal("what they have read", np.array([cached, self._kept_prompts.nbytes]))
        segments, kinds = rest_of(job.prompt.segments, job.prompt.kinds, cached)
        if job.start is not None:
            kinds = []  # its session keeps what was read
        running = self._new_running(job, cached, kinds, stored)
        if not job.goes_on:
            running.ends = self._beginnings.ends(segments, cached)
            running.shared = self._beginnings.shared(job, caches)
        if question:
            segments, caches = self._asking.divide(running, question, segments, caches)
        self._insert(running, segments, caches, job.prompt.ids[:cached])
        self._outbox.put((job, Started(cached)))
        self._say_quoted(running)
        self._metrics.prompt_tokens.inc(len(job.prompt.ids))
        self._metrics.cached_tokens.inc(cached)
        self._metrics.restored_tokens.inc(0 if stored is None else stored.restored)

    def _new_running(self, job: Job, cached: int, kinds: list[str], stored: CachedPrompt | None = None) -> Running:
        sampler = self._samplers.get(id(job.sampler))
        if sampler is None:
            sampler = self._samplers[id(job.sampler)] = GuardedSampler(job.sampler)
        return Running(job, cached, kinds, self._tokenizer.detokenizer, sampler, stored)

    def _lead(self, uid: int, caches: list[Any]) -> None:
        """Let those go on that waited for what a job has read, with copies of its caches."""
        running = self._running[uid]
        running.shared = self._beginnings.shared(running.job, caches)
        for job, stop in running.release():
            if stop != running.prefilled:
                self._admit(job)
                continue
            with self._admitting(job):
                stored = going_on(self._store, job.prompt, running.stored, stop, self._limits.prefill_step_size)
                self._begin(job, [], caches, stop, stored)

    def _insert(self, running: Running, segments: list[list[int]], caches: list[Any] | None, read: list[int]) -> None:
        """Put a job into the batch, with the others of its prompt where only the last token of that is left to read."""
        together = [running]
        if sum(map(len, segments)) == 1:
            together += self._others(running)
        uids = self._batch.insert_segments(
            segments=[list(segments) for _ in together],
            max_tokens=[each.job.max_tokens for each in together],
            caches=[caches] * len(together),
            all_tokens=[list(read) for _ in together],
            samplers=[self._ranks.share_sampler(each.sampler) for each in together],
            logits_processors=[each.processors for each in together],
            stop_sequences=[self._stop_sequences] * len(together),
        )
        self._running.update(zip(uids, together, strict=True))

    def _others(self, running: Running) -> list[Running]:
        """The other answers to a prompt, which is read but for its last token."""
        length = len(running.job.prompt.ids) - 1
        others = [self._new_running(job, length, []) for job in running.pending]
        for each in others:
            each.recalled = running.recalled
        running.pending = []
        return others

    def _ask(self, uid: int, caches: list[Any], tokens: list[int]) -> None:
        """The question alone is left of a prompt: if something has left its caches, read it over what it needs."""
        running = self._running[uid]
        if not (running.job.goes_on or ready_to_recall(caches, len(running.question))):
            running.question = []
            return
        question = self._asking.bring_back(running, caches)
        self._insert(running, [question], caches, tokens)
        self._batch.remove([uid])
        del self._running[uid]
        self._metrics.prompt_tokens.inc(len(running.quoted.ids))
        self._say_quoted(running)

    def _say_quoted(self, running: Running) -> None:
        if running.quoted.ids:
            self._outbox.put((running.job, Quoted(len(running.quoted.ids))))

    def _source(self, job: Job, unread: int, *, alone: bool = False) -> Source:
        """Caches that hold the beginning of a job's prompt, and how much of it. The batch takes copies of them.

        Or the prompt in the store; in both but for its last `unread` tokens. Unless `alone`, all ranks ask at once.
        """
        if job.start is not None and job.start.caches is not None:
            return job.start.caches, job.start.cached, None
        caches, cached = self._kept_prompts.find(job.prompt.ids, unread)
        if self._store is None:
            return caches, cached, None
        step = self._limits.prefill_step_size
        stored = stored_prompt(self._store, job.prompt, unread, step, cached, alone=alone)
        return (caches, cached, None) if stored is None else (None, stored.cached_tokens, stored)

    def _keep_answered(self, running: Running, tokens: list[int], caches: list[Any]) -> None:
        """Keep what an answer leaves: a session's for the session, others for whoever begins the same way."""
        job = running.job
        if job.start is None:
            self._kept_prompts.keep(tokens, caches, "assistant")
        else:
            release(caches)
            hold(caches, None)
            held = what_is_held(caches, self._plan, running.brought())
            kept = self._following.keep(caches)
            self._outbox.put((job, Left(kept, list(tokens), held, running.quoted, running.at)))

    def _step(self) -> None:
        """One token for each job in the batch, or a part of its prompt."""
        with self._fail_batch_on_error():
            read, generated = self._batch.next()
            self._after_reading(read)
            self._after_generating(generated)
            self._fail_jobs_with_sampling_errors()
        self._measure()
        self._outbox.send()

    def _after_reading(self, responses: list[Any]) -> None:
        ended, asking = [], []
        for response in responses:
            running = self._running[response.uid]
            done, total = response.progress
            before, running.prefilled = running.prefilled, len(running.job.prompt.ids) - total + done
            self._metrics.read_tokens.inc(running.prefilled - before)
            self._outbox.put((running.job, Progress(done, total)))
            asks = running.question and total - done == len(running.question)
            if asks:
                asking.append(response.uid)
            keeps = running.kinds and not (asks and running.divided)
            if keeps and response.end_of_segment and not response.end_of_prompt:
                ended.append(response.uid)
            if response.end_of_prompt:
                with self._fail_job_on_error(response.uid):
                    self._asking.listen(running, self._batch, response.uid)
        self._store_points([response.uid for response in responses])
        leading = [each.uid for each in responses if self._running[each.uid].is_awaited]
        for uid in leading:
            with self._fail_job_on_error(uid):
                caches, _ = self._extract(uid)
                self._lead(uid, caches)
        for uid in ended:
            with self._fail_job_on_error(uid):
                running = self._running[uid]
                caches, tokens = self._extract(uid)
                running.shared = self._beginnings.shared(running.job, caches)
                self._kept_prompts.keep(tokens, caches, running.kinds.pop())
        for uid in asking:
            with self._fail_job_on_error(uid):
                caches, tokens = self._extract(uid)
                self._ask(uid, caches, tokens)
        read = [response.uid for response in responses if response.progress[1] - response.progress[0] == 1]
        for uid in [uid for uid in read if uid in self._running and self._running[uid].pending]:
            with self._fail_job_on_error(uid):
                running = self._running[uid]
                caches, tokens = self._extract(uid)
                for each in self._others(running):
                    self._insert(each, [running.job.prompt.ids[-1:]], caches, tokens)

    def _extract(self, uid: int) -> tuple[list[Any], list[int]]:
        """Return a job's caches and the tokens that they hold."""
        caches, tokens = self._batch.extract_cache([uid])[uid]
        return caches, tokens

    def _store_points(self, uids: list[int]) -> None:
        """Store what jobs have read, where a step ended that is worth it."""
        for uid in uids:
            running = self._running[uid]
            with self._fail_job_on_error(uid):
                if running.stored is not None and is_worth_storing(running.stored, running.prefilled):
                    caches, _ = self._extract(uid)
                    running.stored.store(running.prefilled, caches)

    def _after_generating(self, responses: list[Any]) -> None:
        for response in responses:
            with self._fail_job_on_error(response.uid):
                self._process_token(self._running[response.uid], response)
            if response.finish_reason is not None:
                self._drop_running(response.uid)
        self._metrics.generated_tokens.inc(len(responses))

    def _process_token(self, running: Running, response: Any) -> None:
        running.close_stored()
        finish = response.finish_reason
        if finish is None and running.looks is not None:  # also where this rank knows that nobody needs more
            running.looks.token()
        event = running.said(response)
        if isinstance(event, Piece) and event.recalled is not None:
            self._metrics.recalled_tokens.inc(len(event.recalled.positions))
        if finish is not None:
            self._outbox.put((running.job, event))
            self._keep_answered(running, response.all_tokens, response.prompt_cache)
        elif isinstance(event, Failed):
            self._report_failure(running, event.error)
        else:
            self._outbox.put((running.job, event))
            if event.finish is not None:
                self._ended.append(response.uid)

    def _fail_jobs_with_sampling_errors(self) -> None:
        """Fail the jobs whose sampler or processors raised."""
        for uid, running in self._running.items():
            error = running.sampling_error
            if error is not None and uid not in self._ended:
                log.error("sampling failed", exc_info=error)
                self._report_failure(running, ModelFailedError(f"sampling failed: {error}"))
        for running in self._running.values():
            running.sampler.error = None

    def _remove(self, orders: Orders) -> None:
        """Remove jobs from the batch. Keep what they read for later requests, unless they failed."""
        leaving = [*orders.ended, *orders.abandoned, *orders.failed]
        if not leaving:
            return
        extracted = {}
        for uid in (*orders.ended, *orders.abandoned):
            with self._fail_job_on_error(uid):
                extracted.update(self._batch.extract_cache([uid]))
        self._batch.remove(leaving)
        gone = [self._running[uid] for uid in leaving]
        for uid, running in zip(leaving, gone, strict=True):
            with self._fail_job_on_error(uid):
                running.close_stored()
                caches, tokens = extracted.get(uid, (None, []))
                if running.job.start is not None and uid in orders.abandoned:
                    # half an answer: the session stays as it was
                    self._outbox.put((running.job, Left()))
                elif caches is not None and tokens:
                    self._keep_answered(running, tokens, caches)
            self._drop_running(uid)
        self._admit_followers(gone)

    def _admit_followers(self, left: Iterable[Running]) -> None:
        """Let jobs that waited for what others were reading look for it elsewhere."""
        for running in left:
            for job, _ in running.followers:
                self._admit(job)

    def _measure(self) -> None:
        if self._running and time.monotonic() - self._measured < _MEASURE_S:
            return
        self._measured = time.monotonic()
        tokens = [running.prefilled + running.generated for running in self._running.values()]
        native = sum(map(self._plan.fp16_nbytes, tokens)) if self._plan else self._batch.prompt_cache_nbytes
        self._metrics.running.set(len(self._running))
        self._metrics.kv_bytes.set(self._batch.prompt_cache_nbytes)
        self._metrics.memory_bytes.set(mx.get_active_memory())
        self._metrics.kv_fp16_bytes.set(native)
        self._metrics.prompt_cache_bytes.set(self._kept_prompts.nbytes)
        self._metrics.prompt_cache_entries.set(len(self._kept_prompts))
