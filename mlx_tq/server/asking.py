"""What the question of a job brings back before it is read, and looks of the batch's answers while they are made."""

import copy
from dataclasses import astuple, replace
from typing import Any

from mlx_lm.generate import BatchGenerator

from mlx_tq.models import ranks_of
from mlx_tq.prompt_cache.passes import batch_row
from mlx_tq.prompt_cache.plan import Plan
from mlx_tq.prompt_cache.recall import LONGEST_QUESTION
from mlx_tq.server.jobs import Job
from mlx_tq.server.running import Running
from mlx_tq.session.bring_back import hold
from mlx_tq.session.looks import Looks
from mlx_tq.session.recall import live_positions, question_of, recall
from mlx_tq.session.transcript import Rehydration


class Asking:
    """Brings back what jobs need, as rows and, to sessions, as text.

    Args:
        model, tokenizer: of mlx-lm.
        plan: of the caches; None where nothing is compressed.
        step: tokens of a prompt that are read at a time.
    """

    def __init__(self, model: Any, tokenizer: Any, plan: Plan | None, step: int) -> None:
        self._model, self._tokenizer, self._step = model, tokenizer, step
        self._ranks = ranks_of(model)
        self._compresses = plan is not None
        self._recalls = plan is not None and plan.recalls

    def question(self, job: Job) -> list[int]:
        """The tokens at the end of a prompt before which something may come back; none where nothing does.

        A session's turn asks whole, like a chat's, unless it is long: then its document is read first.
        """
        ids = job.prompt.segments[-1]
        if job.goes_on and not (self._recalls and len(ids) > LONGEST_QUESTION):
            return ids
        return question_of(self._tokenizer, ids)[1] if self._recalls else []

    def divide(
        self, running: Running, question: list[int], segments: list[list[int]], caches: list[Any] | None
    ) -> tuple[list[list[int]], list[Any] | None]:
        """Cut what is left to read before the question; where nothing comes before it, it asks at once.

        Args:
            running: the job.
            question: that ends its prompt.
            segments: of the prompt, that are left to read.
            caches: from which it goes on, which stay as they are.

        Returns:
            The segments to read, and the caches, to which something has come back.
        """
        running.question = question[-len(segments[-1]) :]
        document = segments[-1][: -len(running.question)]
        running.divided = bool(document)
        parts = [*segments[:-1], *(part for part in (document, running.question) if part)]
        if len(parts) > 1:
            return parts, caches
        if caches is None:
            running.question = []
            return parts, None
        caches = copy.deepcopy(caches) if self._compresses else caches
        return [self.bring_back(running, caches)], caches

    def bring_back(self, running: Running, caches: list[Any]) -> list[int]:
        """Bring back to caches what a job's question needs; what is left to read is returned, with what is quoted.

        A quotation stands before the words of a turn, or before the question that ends a long one. It has nothing that
        came back as rows.
        """
        job, question = running.job, list(running.question)
        running.question = []
        running.recalled = recall(self._model, caches, question, self._step, named=job.named)
        start = job.start
        if start is None or start.caches is None:
            return question
        read = len(job.prompt.ids) - len(question)
        live, rows = live_positions(caches, read), len(running.recalled.meaning)
        quotation = Rehydration(*self._ranks.broadcast(lambda: astuple(start.quote(live, rows))))
        at = max(0, start.cached + start.at - read)
        hold(caches, quotation.at(read + at))
        question[at:at] = quotation.ids
        running.quoted, running.at = quotation, read + at - start.cached
        job.prompt = replace(job.prompt, ids=[*job.prompt.ids[:read], *question])
        return question

    def listen(self, running: Running, batch: BatchGenerator, uid: int) -> None:
        """The answer begins, number `uid` of a batch; its queries will look into the archive."""
        if self._recalls:
            generating = batch._generation_batch  # mlx-lm gives out copies alone
            caches = batch_row(generating.prompt_cache, generating.uids.index(uid))
            running.looks = Looks(caches, running.recalled, quoted=running.quoted.ranges)
            running.looks.begin()
