"""`Grammars` compiles grammars for a tokenizer; a `Constraint` masks the tokens that an answer may not have."""

import asyncio
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from transformers import PreTrainedTokenizerFast

from mlx_tq.grammar.grammar_source import GrammarError, GrammarSource
from mlx_tq.grammar.sandbox import STACK_BYTES, GrammarChecker, compile_grammar, shorten_message

_MAX_CACHED = 256  # results of checks; each key is up to 64 kB
# Time budget for masks: a base and an allowance per token. A typical mask takes 0.2 ms.
_BASE_BUDGET_S, _BUDGET_PER_TOKEN_S = 0.25, 0.005


@dataclass(eq=False)
class CompiledGrammar:
    """A compiled grammar, with the time that the masks of its answers took and may take."""

    matcher: LLMatcher  # at the start of the grammar
    nbytes: int
    mask_seconds: float = 0.0
    mask_budget: float = _BASE_BUDGET_S


class Constraint:
    """Logits processor that allows only what a grammar allows; it must be the last one.

    The grammar applies after the tokens `after`, the end of the model's reasoning. `error` says why the grammar can
    no longer be followed; then all tokens are allowed. Copies share the time budget of the grammar.
    """

    def __init__(self, grammar: CompiledGrammar, eos_ids: frozenset[int], after: tuple[int, ...] = ()) -> None:
        self._grammar, self._eos_ids, self._after = grammar, eos_ids, after
        self._matcher = grammar.matcher.deep_copy()
        self._last: tuple[int, ...] = ()
        self._started = self._ended = False
        self.error: str | None = None

    def copy(self) -> "Constraint":
        """Return a constraint for another answer to the same prompt, before either has started."""
        return Constraint(self._grammar, self._eos_ids, self._after)

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Set the logits [1, V] of tokens that may not follow `tokens` [N] to -inf."""
        mx.async_eval(logits)  # type: ignore[no-untyped-call] # the model computes while the mask is made
        if self._started:
            last: Any = tokens[-1].item()
            self._consume(last)
        self._started = True
        if self._ended or self._after or self.error is not None:
            return logits
        grammar, started = self._grammar, time.perf_counter()
        mask = self._matcher.compute_bitmask()
        grammar.mask_seconds += time.perf_counter() - started
        grammar.mask_budget += _BUDGET_PER_TOKEN_S
        self._take_error()
        if self.error is None and grammar.mask_seconds > grammar.mask_budget:
            self.error = (
                f"computing token masks took {grammar.mask_seconds:.1f} s, over the limit of {_BASE_BUDGET_S:g} s plus "
                f"{1000 * _BUDGET_PER_TOKEN_S:g} ms per token; simplify the schema or grammar"
            )
        if self.error is not None:
            return logits
        allowed = np.unpackbits(np.frombuffer(mask, np.uint8), count=logits.shape[-1], bitorder="little")
        return mx.where(mx.array(allowed.view(bool)), logits, -mx.inf)

    def check(self) -> None:
        """Raise `GrammarError` if the grammar can no longer be followed."""
        if self.error is not None:
            raise GrammarError(f"the answer cannot follow its grammar any further: {self.error}")

    def _consume(self, token: int) -> None:
        if token in self._eos_ids:
            self._ended = True
        elif self._after:
            self._last = (*self._last, token)[-len(self._after) :]
            if self._last == self._after:
                self._after = ()
        elif self.error is None:
            self._matcher.consume_token(token)
            self._take_error()

    def _take_error(self) -> None:
        if self._matcher.is_error():
            self.error = shorten_message(self._matcher.get_error())


class Grammars:
    """Compiles schemas and grammars for mlx-lm's tokenizer, whose vocabulary takes half a second to load."""

    def __init__(self, tokenizer: Any) -> None:
        self._eos_ids = frozenset(tokenizer.eos_token_ids)
        self._reasoning_end = tuple(tokenizer.think_end_tokens or ())
        self._tokenizer: LLTokenizer | None = None
        self._checker: GrammarChecker | None = None
        self._results: OrderedDict[GrammarSource, GrammarError | int] = OrderedDict()
        # Compiling recurses deeply. The one thread starts now, while the stack size is set.
        usual_stack = threading.stack_size(STACK_BYTES)
        self._compiler = ThreadPoolExecutor(1, "grammar")
        self._compiler.submit(int).result()
        threading.stack_size(usual_stack)
        if tokenizer.response_transitions or tokenizer.structural_markers:
            return  # answers have several channels; a grammar describes only one
        if not isinstance(tokenizer._tokenizer, PreTrainedTokenizerFast):
            return  # others have no JSON format
        with suppress(ValueError, RuntimeError):  # a tokenizer that llguidance cannot read
            backend = copy(tokenizer._tokenizer.backend_tokenizer)
            backend.no_padding()
            backend.no_truncation()
            text, eos_ids = str(backend.to_str()), sorted(self._eos_ids)  # `tokenizer.json` with the added tokens
            self._tokenizer = LLTokenizer(text, eos_token=eos_ids)
            self._checker = GrammarChecker(text, eos_ids)

    async def compile(self, source: GrammarSource) -> CompiledGrammar:
        """Compile a grammar after a separate process has test-compiled it; raise `GrammarError` if it fails there.

        Results of the test are cached, except for exceeded limits.
        """
        if self._tokenizer is None or self._checker is None:
            raise GrammarError("this model's tokenizer does not support grammars; ask for plain text")
        if source not in self._results:
            self._results[source] = await self._checker.check(source)
            if len(self._results) > _MAX_CACHED:
                self._results.popitem(last=False)
        self._results.move_to_end(source)
        result = self._results[source]
        if isinstance(result, GrammarError):
            raise GrammarError(str(result), result.path)
        loop = asyncio.get_running_loop()
        matcher = await loop.run_in_executor(self._compiler, compile_grammar, source, self._tokenizer)
        return CompiledGrammar(matcher, result)

    def constraint(self, grammar: CompiledGrammar, *, thinks: bool = False) -> Constraint:
        """Return a constraint for one answer. With `thinks`, it starts after the reasoning."""
        return Constraint(grammar, self._eos_ids, self._reasoning_end if thinks else ())

    def close(self) -> None:
        if self._checker is not None:
            self._checker.close()
