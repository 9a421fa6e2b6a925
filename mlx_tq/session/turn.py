"""`Turn`: one prompt and its answer. `generate`, `chat`, `demo` and `Session` run it."""

import math
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, suppress
from dataclasses import astuple, dataclass
from typing import Any, Self

import mlx.core as mx
import numpy as np
from mlx_lm.generate import stream_generate

from mlx_tq.cache.layer import CompressedKVCache, cache_parts, can_trim
from mlx_tq.cache.recurrent_states import EXACT, has_states, without_states
from mlx_tq.errors import CacheFormatError, NonFiniteError
from mlx_tq.models import ranks_of
from mlx_tq.prefix_cache.prefix_cache import PrefixCache, ReusedPrefix, reuse_prefix
from mlx_tq.prompt_cache.compressed import compressed_attention
from mlx_tq.prompt_cache.layer_group import cache_offsets, compressed_caches, layer_group_of
from mlx_tq.prompt_cache.recall import MAX_QUESTION
from mlx_tq.session.restore import (
    ProgressCallback,
    RecallDuringDecode,
    RecallResult,
    evict_before_question,
    live_positions,
    prefill,
    release,
    restore_context,
    split_question,
)
from mlx_tq.session.shadow_mode import Shadow
from mlx_tq.session.state_history import StateHistory
from mlx_tq.session.transcript import NO_QUOTATION, Quotation, SearchHits, Transcript
from mlx_tq.speculative.lookup_decode import stream_with_lookup
from mlx_tq.speculative.lookup_mode import LookupMode
from mlx_tq.speculative.prompt_lookup import PromptLookup

UNLIMITED = 2**31  # positions of a model that does not say how many it has
_NAN_LOGITS = "the model's logits are NaN after the prompt. Check its weights, or load it in bfloat16 or float32."


@dataclass(frozen=True)
class TurnStats:
    """Tokens, speed and recall of one turn."""

    prompt_tokens: int  # quotation included
    cached_tokens: int  # of the prompt, from the prefix cache
    generation_tokens: int
    drafted_tokens: int  # that were verified
    accepted_tokens: int  # of these
    finish_reason: str  # "stop", "length" or "interrupted"
    ttft: float  # seconds to the first token, recall included
    seconds: float  # of the whole turn
    prompt_tps: float  # tokens per second
    generation_tps: float
    peak_memory: int  # of the process until now, in bytes
    restore_seconds: float  # that the prefix cache took
    recalled: tuple[int, ...]  # positions whose rows were reloaded for the turn, ascending
    by_search: tuple[int, ...]  # those that the rescue service's search selected; attention scores selected the others
    archived: int  # tokens in the archive at its latest search
    recall_is_partial: bool  # a recalled sentence is not whole in the cache
    recall_seconds: float  # that all searches of the archive took
    searches: int  # while decoding
    search_seconds: float  # their part of `recall_seconds`
    quotation: Quotation  # evicted text that the prompt quotes
    rescue_seconds: float  # that the rescue service's search took


class StoppedError(Exception):
    """The turn was stopped during its prefill."""


class Turn:
    """One prompt and its answer on the caches of a session: prefill, recall, quote, decode.

    Call `prepare` and `decode` inside its context. Leaving the context restores consistency: caches and transcript have
    the same tokens again, even after an interruption in the middle of a forward pass, and recalled rows are dropped.
    The server runs the rows of a batch with the two halves of this, `restore_context` and `RecallDuringDecode`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        caches: list[Any],
        transcript: Transcript,
        step: int,
        *,
        prefix_cache: PrefixCache | None,
        shadow: Shadow | None,
        lookup_mode: LookupMode,
        progress: ProgressCallback,
        history: StateHistory | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._model, self._tokenizer, self._caches, self._transcript = model, tokenizer, caches, transcript
        self._step, self._prefix_cache, self._shadow = step, prefix_cache, shadow
        self._lookup_mode, self._history = lookup_mode, history or StateHistory(EXACT)
        self._progress, self._is_stopped = progress, is_stopped
        self.start = len(transcript.ids)
        self.is_undone = False  # nothing was answered, and no tokens stay; the caches of a first turn must be replaced
        self.is_consistent = True  # the caches could be trimmed to one length
        self._ranks, self._stack = ranks_of(model), ExitStack()
        self._began, self._question = time.perf_counter(), list[int]()
        self._prefix, self._quotation = ReusedPrefix(), NO_QUOTATION
        self._recall = RecallDuringDecode(caches, RecallResult())
        self._prompt_tokens = self._prefilled = self._room = 0
        self._ttft = self._rescue_seconds = 0.0
        self._response: Any = None  # the latest of mlx-lm
        self._drafted = self._accepted = 0

    def __enter__(self) -> Self:
        self._stack.enter_context(compressed_attention(self._model))
        return self

    def prepare(
        self, prompt: list[int], query: str | None, *, split: bool = False, quote_at: int = 0, room: int = UNLIMITED
    ) -> None:
        """Prefill what is before the question, then recall and quote what the question needs.

        Args:
            prompt: tokens of the prompt.
            query: text to search evicted text for; None if nothing may be recalled or quoted.
            split: prefill the document of the prompt first, so that its question can recall what it evicted.
            quote_at: index of a prompt without document before which the quotation goes.
            room: positions that remain after the prompt, for quotation and answer.
        """
        self._prompt_tokens, self._room = len(prompt), room
        self._ranks.check_equal("the tokens of the prompt", np.array(prompt))
        # Only the first rank knows of a rescue service, so it decides for all.
        document = self._ranks.broadcast(lambda: len(split_question(self._tokenizer, prompt)[0]) if split else 0)
        self._prefix = self._stack.enter_context(
            reuse_prefix(self._prefix_cache, self._caches, prompt[: document or -1])
        )
        cached = self._prefix.restored
        self._prefilled = max(document, cached)
        self._transcript.append(prompt[: self._prefilled])
        progress = self._progress_from(cached)
        prefill(self._model, self._caches, prompt[cached : self._prefilled], self._step, progress)
        question = prompt[self._prefilled :]
        quote_at = 0 if self._prefilled else quote_at
        if query is not None:
            self._restore_context(query, question, quote_at)
        question[quote_at:quote_at] = self._quotation.ids
        self._transcript.append(question, self._quotation, quote_at)
        self._question, self._prompt_tokens = question, self._prefilled + len(question)

    def _restore_context(self, query: str, question: list[int], quote_at: int) -> None:
        evict_before_question(self._caches, min(len(question), MAX_QUESTION))
        self._send_evicted()
        prefilled, began = len(self._transcript.ids), time.perf_counter()
        hits = search_evicted(self._model, self._transcript, query, live_positions(self._caches, prefilled))
        self._rescue_seconds = time.perf_counter() - began

        def quote(live: np.ndarray, recalled_tokens: int) -> Quotation:
            quotation = self._transcript.quote(hits, live, used=recalled_tokens)
            return quotation if len(quotation.ids) < self._room else NO_QUOTATION

        passage_at = self._transcript.sentence_at
        recalled, self._quotation = restore_context(
            *(self._model, self._caches, question, self._step),
            hits=hits,
            quote=quote,
            prefilled=prefilled,
            quote_at=quote_at,
            passage_at=passage_at,
        )
        self._recall = RecallDuringDecode(self._caches, recalled, self._quotation.ranges, passage_at)
        self._recall.start()

    def decode(self, max_tokens: int, **options: Any) -> Generator[Any]:
        """Yield mlx-lm's response to each token of the answer; `options` go to its `stream_generate`.

        A `prompt_cache` among the options may add the caches of a draft model.
        """
        room = self._room - len(self._quotation.ids)
        caches = options.setdefault("prompt_cache", self._caches)
        if self._shadow is not None:
            self._shadow.begin(self._question[-1], len(self._transcript.ids) - 1)
        options["max_tokens"] = room if max_tokens < 0 else min(max_tokens, room)
        options |= {"prefill_step_size": self._step, "prompt_progress_callback": self._progress_from(self._prefilled)}
        lookup = self._begin_lookup(options)
        with closing(self._stream(lookup, options)) as responses:
            for response in responses:
                if self._response is None and "draft_model" in options:  # mlx-lm reports no progress with one
                    self._progress(self._prompt_tokens, self._prompt_tokens)
                if self._response is None:
                    if math.isnan(response.logprobs[response.token].item()):
                        raise NonFiniteError(_NAN_LOGITS)
                    self._ttft = time.perf_counter() - self._began
                self._response = response
                self._count_drafts(response, lookup, options)
                self._transcript.append([response.token])
                self._send_evicted()
                self._recall.count_token()
                if self._shadow is not None:
                    self._shadow.token(response.token, response.text, response.logprobs)
                yield response
                if self._is_stopped():
                    break
        for cache in compressed_caches(caches):
            cache.check_health()

    def _begin_lookup(self, options: dict[str, Any]) -> PromptLookup | None:
        if self._shadow is not None or "draft_model" in options or "input_embeddings" in options:
            return None
        return self._lookup_mode.begin(self._model, self._caches, self._transcript.ids)

    def _stream(self, lookup: PromptLookup | None, options: dict[str, Any]) -> Generator[Any]:
        if lookup is not None:
            return stream_with_lookup(self._model, self._tokenizer, self._question, lookup, **options)
        return stream_generate(self._model, self._tokenizer, self._question, **options)  # type: ignore[no-any-return]

    def _count_drafts(self, response: Any, lookup: PromptLookup | None, options: dict[str, Any]) -> None:
        self._accepted += response.from_draft
        if lookup is not None:
            self._drafted = lookup.drafted
        elif "draft_model" in options and not response.from_draft:  # the draw that ends a pass of mlx-lm
            self._drafted += options["num_draft_tokens"]

    def _progress_from(self, start: int) -> ProgressCallback:
        """Return mlx-lm's progress callback for a prefill that begins after the first `start` tokens."""

        def report(done: int, _: int) -> None:
            self._prefix.note(start + done)
            if self._is_stopped() and start + done < self._prompt_tokens:
                raise StoppedError
            self._send_evicted()
            self._progress(start + done, self._prompt_tokens)

        return report

    def _send_evicted(self) -> None:
        sequence = layer_group_of(self._caches)
        if sequence is not None:
            self._transcript.send_evicted(sequence.lost)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        try:
            self._stack.close()
        finally:
            self._restore_consistency(kind not in (None, StoppedError, GeneratorExit))
        return kind is StoppedError

    def _restore_consistency(self, has_failed: bool) -> None:
        self._ranks.synchronize()
        self._recall.stop()
        is_answered = self._response is not None
        if not is_answered and not self.start:  # new caches also free the buffers
            self.is_undone = True
            return
        self.is_undone = not is_answered and roll_back(self._caches, self.start, self._history)
        length = self.start if self.is_undone else min([len(self._transcript.ids), *cache_offsets(self._caches)])
        # After Ctrl-C in a forward pass, some layers have a token that others have not.
        is_even = all(offset == length for offset in cache_offsets(self._caches))
        # The states may even have one that no layer's keys and values have yet.
        if (not is_even or has_failed) and not self.is_undone and has_states(self._caches):
            length = self.start
            self.is_consistent = self.is_undone = roll_back(self._caches, length, self._history)
        else:
            self.is_consistent = is_even or trim_caches(self._caches, length)
        if self.is_consistent:
            self._transcript.truncate(length)
            self._send_evicted()  # after an undo: its text does not go to the service
            release(self._caches)

    @property
    def stats(self) -> TurnStats:
        """The statistics of the turn until now."""
        last, recall, cached = self._response, self._recall.result(), self._prefix.restored
        prompt_tps = last.prompt_tps if last else 0.0
        if last and self._prefilled > cached:  # mlx-lm prefilled only the question
            prompt_tps = (self._prompt_tokens - cached) / self._ttft
        return TurnStats(
            prompt_tokens=self._prompt_tokens,
            cached_tokens=cached,
            generation_tokens=last.generation_tokens if last else 0,
            drafted_tokens=self._drafted,
            accepted_tokens=self._accepted,
            finish_reason=(last.finish_reason if last else None) or "interrupted",
            ttft=self._ttft,
            seconds=time.perf_counter() - self._began,
            prompt_tps=prompt_tps,
            generation_tps=last.generation_tps if last else 0.0,
            peak_memory=mx.get_peak_memory(),
            restore_seconds=self._prefix.seconds,
            recalled=tuple(recall.positions),
            by_search=recall.by_search,
            archived=recall.archived,
            recall_is_partial=recall.is_partial,
            recall_seconds=recall.seconds,
            searches=self._recall.searches,
            search_seconds=self._recall.seconds,
            quotation=self._quotation,
            rescue_seconds=self._rescue_seconds,
        )


def trim_caches(caches: list[Any], length: int) -> bool:
    """Trim caches to `length` tokens; return whether all could be. If not, caches of one length stay as they are."""
    parts = [part for part in cache_parts(caches) if hasattr(part, "offset")]
    with suppress(CacheFormatError):  # of evicting layers, which evict alike: the first refuses for all
        for part in sorted(parts, key=lambda part: not isinstance(part, CompressedKVCache)):
            part.trim(part.offset - length)
    return all(offset == length for offset in cache_offsets(caches))


def roll_back(caches: list[Any], length: int, history: StateHistory) -> bool:
    """Trim caches to `length` tokens, with the states that `history` keeps; return whether that is possible."""
    if not has_states(caches):
        return can_trim(caches) and trim_caches(caches, length)
    can_restore = history.holds(caches, length) and can_trim(without_states(caches))
    if not (can_restore and trim_caches(caches, length)):
        return False
    history.restore(length)
    return True


def search_evicted(model: Any, transcript: Transcript, query: str, live: np.ndarray) -> SearchHits:
    """Search evicted text for `query`; the first of several ranks searches for all."""
    ranges, limit = ranks_of(model).broadcast(lambda: astuple(transcript.search(query, live)))
    return SearchHits(tuple((start, stop) for start, stop in ranges), limit)
