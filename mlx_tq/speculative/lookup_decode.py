"""Generation with prompt lookup: mlx-lm's `stream_generate`, in which some passes verify a draft."""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.generate import GenerationResponse, generation_stream, maybe_quantize_kv_cache, wired_limit
from mlx_lm.models.cache import KVCache
from mlx_lm.sample_utils import greedy_sampler

from mlx_tq.integration.rollback import VerifyPass, rollback_windows
from mlx_tq.speculative.draft_gate import MAX_ROWS
from mlx_tq.speculative.prompt_lookup import PromptLookup
from mlx_tq.speculative.stopwatch import Stopwatch

_CLEAR_EVERY = 256  # tokens between releases of unused buffers, as in mlx-lm

ProgressCallback = Callable[[int, int], None]  # the number of tokens prefilled, and the total


class Drawn(NamedTuple):
    """A token [1] that was drawn from log-probabilities [V]."""

    token: mx.array
    logprobs: mx.array


class LookupDecoder:
    """Decodes one answer; the options are those of mlx-lm's `generate_step`.

    A draft is accepted as far as it equals what the sampler draws. Samplers and processors are called once per token
    and in order, as without drafts: a seed leads to the same answer, and nothing of theirs has to be rolled back.
    """

    def __init__(
        self,
        model: Any,
        lookup: PromptLookup,
        prompt_cache: list[Any],
        *,
        max_tokens: int,
        sampler: Callable[[mx.array], mx.array] | None = None,
        logits_processors: Sequence[Callable[..., mx.array]] | None = None,
        prefill_step_size: int = 2048,
        kv_bits: int | None = None,
        kv_group_size: int = 64,
        quantized_kv_start: int = 5000,
        prompt_progress_callback: ProgressCallback = lambda *_: None,
    ) -> None:
        self._model, self._lookup, self._caches, self._max_tokens = model, lookup, prompt_cache, max_tokens
        self._sampler, self._processors = sampler or greedy_sampler, logits_processors or ()
        self._step_size, self._progress = prefill_step_size, prompt_progress_callback
        self._quantization = quantized_kv_start, kv_group_size, kv_bits
        self._context = mx.array([], mx.uint32)  # the tokens of this prompt and answer, for the processors
        self._watch, self._count = Stopwatch(), 0  # of tokens yielded

    def tokens(self, prompt: mx.array) -> Generator[tuple[int, mx.array, bool]]:
        """Yield each token, its log-probabilities, and whether it was drafted."""
        lookup, watch = self._lookup, self._watch
        with mx.stream(generation_stream):
            drawn, is_plain = self._begin_step(self._prefill(prompt.astype(mx.uint32))), False
            while self._count < self._max_tokens:
                # Without a draft in sight, the next pass begins before the last token is known.
                drafts = lookup.draft() and not self._is_quantized_soon()
                following = None if drafts else self._begin_step(drawn.token)
                token: Any = drawn.token.item()
                if self._count == 0:
                    self._progress(prompt.size, prompt.size)
                    watch.lap()
                if is_plain and lookup.gate is not None:
                    lookup.gate.note_plain_step(watch.lap())
                lookup.append(token)
                draft = [] if following is not None else lookup.draft(self._max_tokens - self._count - 1)
                is_plain = not draft
                if is_plain:
                    following = following or self._begin_step(drawn.token)
                    yield self._report(token, drawn, from_draft=False)
                    watch.resume()
                    drawn = following
                else:
                    drawn = yield from self._verify(drawn, [token, *draft])

    def _is_quantized_soon(self) -> bool:
        """Return whether a verify pass could read rows unquantized that plain steps would have quantized before."""
        start, _, bits = self._quantization
        return bits is not None and any(
            type(cache) is KVCache and cache.offset + MAX_ROWS >= start for cache in self._caches
        )

    def _verify(self, drawn: Drawn, ids: list[int]) -> Generator[tuple[int, mx.array, bool], None, Drawn]:
        """Run the last token and a draft; yield the token and what is accepted, and return the draw after that."""
        with rollback_windows(self._caches, len(ids)):
            drawn = yield from self._accept(drawn, ids)
        if self._lookup.gate is not None:
            self._lookup.gate.note_verify_pass(len(ids), self._watch.lap())
        return drawn

    def _accept(self, drawn: Drawn, ids: list[int]) -> Generator[tuple[int, mx.array, bool], None, Drawn]:
        lookup, rows, num_read = self._lookup, mx.array(ids, mx.uint32), 1
        verified = VerifyPass(self._caches, ids, lambda ids: self._run(mx.array(ids, mx.uint32)))
        logits = self._run(rows)
        mx.async_eval(logits)  # type: ignore[no-untyped-call]
        lookup.drafted += len(ids) - 1
        try:
            yield self._report(ids[0], drawn, from_draft=False)
            self._watch.resume()
            for i in range(len(ids)):
                drawn = self._draw(rows[i : i + 1], logits[:, i])
                token: Any = drawn.token.item()
                if num_read == len(ids) or token != ids[num_read]:
                    break
                num_read += 1
                lookup.accepted += 1
                lookup.append(token)
                yield self._report(token, drawn, from_draft=True)
                self._watch.resume()
        except GeneratorExit:
            self._sampler(drawn.logprobs[None])  # as a plain step would have, so that a later answer draws the same
            raise
        finally:
            verified.roll_back(len(ids) - num_read)
        return drawn

    def _report(self, token: int, drawn: Drawn, *, from_draft: bool) -> tuple[int, mx.array, bool]:
        """Return what is yielded of a token. Time does not count until the consumer wants the next one."""
        if self._count % _CLEAR_EVERY == 0:
            mx.clear_cache()
        self._count += 1
        self._watch.pause()
        return token, drawn.logprobs, from_draft

    def _prefill(self, prompt: mx.array) -> mx.array:
        """Prefill all but the last token, and return that."""
        total, done = prompt.size, 0
        self._progress(0, total)
        while total - done > 1:
            step = prompt[done : min(done + self._step_size, total - 1)]
            self._run(step)
            mx.eval([cache.state for cache in self._caches])
            done += step.size
            self._progress(done, total)
            mx.clear_cache()
        self._context = prompt[:-1]
        return prompt[-1:]

    def _begin_step(self, token: mx.array) -> Drawn:
        """Begin the pass of one token, and draw the next."""
        drawn = self._draw(token, self._run(token)[:, -1])
        mx.async_eval(*drawn)  # type: ignore[no-untyped-call]
        return drawn

    def _run(self, tokens: mx.array) -> mx.array:
        """Run tokens [N] through the model; return logits [1, N, V]."""
        logits: mx.array = self._model(tokens[None], cache=self._caches)
        maybe_quantize_kv_cache(self._caches, *self._quantization)
        return logits

    def _draw(self, last: mx.array, logits: mx.array) -> Drawn:
        """Draw the token after `last` [1] from logits [1, V]."""
        if self._processors:
            self._context = mx.concatenate([self._context, last])
            for processor in self._processors:
                logits = processor(self._context, logits)
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        return Drawn(self._sampler(logprobs), logprobs[0])


def stream_with_lookup(
    model: Any, tokenizer: Any, prompt: list[int], lookup: PromptLookup, *, max_tokens: int, **options: Any
) -> Generator[GenerationResponse]:
    """Yield mlx-lm's response to each token of an answer; `options` are those of `LookupDecoder`."""
    detokenizer, count, reason = tokenizer.detokenizer, 0, None
    decoder = LookupDecoder(model, lookup, max_tokens=max_tokens, **options)
    with wired_limit(model, [generation_stream]), closing(decoder.tokens(mx.array(prompt))) as tokens:
        began, prompt_tps = time.perf_counter(), 0.0
        for token, logprobs, from_draft in tokens:
            count += 1
            if count == 1:
                now = time.perf_counter()
                prompt_tps, began = len(prompt) / (now - began), now
            if token in tokenizer.eos_token_ids:
                reason = "stop"
            else:
                detokenizer.add_token(token)
                reason = "length" if count == max_tokens else None
            if reason is not None:
                detokenizer.finalize()
            yield GenerationResponse(
                text=detokenizer.last_segment,
                token=token,
                logprobs=logprobs,
                from_draft=from_draft,
                prompt_tokens=len(prompt),
                prompt_tps=prompt_tps,
                generation_tokens=count,
                generation_tps=count / (time.perf_counter() - began),
                peak_memory=mx.get_peak_memory() / 1e9,
                finish_reason=reason,
            )
            if reason is not None:
                break
