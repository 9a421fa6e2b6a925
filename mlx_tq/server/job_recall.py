"""Recall for jobs: before the question is prefilled, and while the answer is decoded."""

import copy
import logging
from dataclasses import astuple
from functools import partial
from typing import Any

import numpy as np

from mlx_tq.models import ranks_of
from mlx_tq.prompt_cache.plan import Plan
from mlx_tq.prompt_cache.recall import MAX_QUESTION, PassageAt
from mlx_tq.server.job import Job, RunningJob
from mlx_tq.session.restore import RecallDuringDecode, restore_context, split_question, take_archive_warning
from mlx_tq.session.text import PlainText
from mlx_tq.session.transcript import NO_HITS, Quotation, sentence_at

log = logging.getLogger(__name__)


class JobRecall:
    """Reload archived rows for jobs, and quote evicted text to sessions."""

    def __init__(self, model: Any, tokenizer: Any, plan: Plan | None, prefill_step_size: int) -> None:
        self._model, self._tokenizer, self._prefill_step_size = model, tokenizer, prefill_step_size
        self._ranks = ranks_of(model)
        self._compresses = plan is not None
        self._recalls = plan is not None and plan.recalls
        self._decode = PlainText(tokenizer).decode

    def question(self, job: Job) -> list[int]:
        """Return the end of the prompt that serves as the question, or [] if nothing can be recalled.

        A session's whole turn is the question, unless it is long; then only its end is.
        """
        if job.only_prefills:
            return []
        last_segment = job.prompt.segments[-1]
        if job.continues_session and not (self._recalls and len(last_segment) > MAX_QUESTION):
            return last_segment
        return split_question(self._tokenizer, last_segment)[1] if self._recalls else []

    def split_question(
        self, running: RunningJob, question: list[int], segments: list[list[int]], caches: list[Any] | None
    ) -> tuple[list[list[int]], list[Any] | None]:
        """Split the segments before the question. If nothing precedes it, recall immediately, into copies of `caches`.

        Returns the segments to prefill, and the caches to start from.
        """
        running.question = question[-len(segments[-1]) :]
        document = segments[-1][: -len(running.question)]
        parts = [*segments[:-1], *(part for part in (document, running.question) if part)]
        if len(parts) > 1:
            return parts, caches
        if caches is None:
            running.question = []
            return parts, None
        caches = copy.deepcopy(caches) if self._compresses else caches
        return [self.before_question(running, caches)], caches

    def before_question(self, running: RunningJob, caches: list[Any]) -> list[int]:
        """Recall what the question needs into `caches`. Return the rest of the prompt, with the quotation.

        The quotation precedes the last user message, or the question that ends a long turn. It repeats no recalled row.
        """
        start, question = running.job.session, list(running.question)
        running.question = []
        prefilled, index, quote = len(running.prompt_ids) - len(question), 0, None
        if start is not None and start.caches is not None:
            index = max(0, start.cached_tokens + start.user_start - prefilled)

            def quote(live: np.ndarray, recalled_tokens: int) -> Quotation:
                return Quotation(*self._ranks.broadcast(lambda: astuple(start.quote(live, recalled_tokens))))

        running.recalled, quotation = restore_context(
            self._model,
            caches,
            question,
            self._prefill_step_size,
            hits=NO_HITS if start is None else start.search_hits,
            quote=quote,
            prefilled=prefilled,
            quote_at=index,
            passage_at=self._sentences_of(running),
        )
        if start is None or quote is None:
            return question
        question[index:index] = quotation.ids
        running.quotation, running.quotation_start = quotation, prefilled + index - start.cached_tokens
        running.prompt_ids = [*running.prompt_ids[:prefilled], *question]
        return question

    def begin_answer(self, running: RunningJob, row: list[Any]) -> None:
        """Let the answer's queries search the archive; `row` holds the job's own caches in the batch."""
        if self._recalls:
            sentences, quoted = self._sentences_of(running), running.quotation.ranges
            running.decode_recall = RecallDuringDecode(row, running.recalled, quoted, sentences)
            running.decode_recall.start()

    def _sentences_of(self, running: RunningJob) -> PassageAt:
        # Of the job only its tokens: caches would wait for the garbage collector otherwise.
        return partial(sentence_at, ids=running.prompt_ids, decode=self._decode)


def log_archive_warning(caches: list[Any]) -> None:
    if warning := take_archive_warning(caches):
        log.warning(warning)
