"""`Grammars` compiles grammars for a tokenizer; a `Constraint` masks the tokens that an answer may not have."""

import asyncio
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
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

log = logging.getLogger(__name__)

_MAX_CACHED = 256  # results of checks; each key is up to 256k characters
_MAX_KEPT, _MAX_KEPT_BYTES = 8, 2**25  # compiled grammars for later requests, and the size of one
# Time budget for masks: a base and an allowance per token. A typical mask takes 0.2 ms.
_BASE_BUDGET_S, _BUDGET_PER_TOKEN_S = 0.25, 0.005


@dataclass(eq=False)
class CompiledGrammar:
    """A compiled grammar, with the time that the masks of its answers took and may take."""

    matcher: LLMatcher  # at the start of the grammar
    nbytes: int
    mask_seconds: float = 0.0
    mask_budget: float = _BASE_BUDGET_S


@dataclass(frozen=True)
class AnswerMarks:
    """The reasoning marks, EOS ids and tokenizer of a model, which its constraints need."""

    eos_ids: frozenset[int]
    think_start: str
    think_end: str
    decode: Callable[[list[int]], str]
    tokenizer: LLTokenizer
    token_ids: Mapping[str, int]  # of marks that are tokens of their own


class Constraint:
    """Logits processor that allows only what a grammar allows; it must be the last one.

    The grammar applies to the whole answer. If the prompt has opened the model's reasoning, it applies after that. With
    `call_start`, the grammar applies from each marker after the reasoning until the grammar is complete; other text is
    unconstrained. If a call cannot match the grammar, the rest of the answer is unconstrained.
    A marker that is a token of its own counts only as that token. Others may be mentioned: the token after them is
    free, and the grammar applies only if it allows that token.

    `param` is the request's argument that the grammar came from. Copies share the time budget of the grammar.
    """

    def __init__(
        self,
        grammar: CompiledGrammar,
        marks: AnswerMarks,
        *,
        thinks: bool = False,
        call_start: str = "",
        param: str = "response_format",
    ) -> None:
        self._grammar, self._marks, self._thinks, self._call_start = grammar, marks, thinks, call_start
        self._matcher = grammar.matcher.deep_copy()
        self._prompt_tokens: int | None = None
        self.param = param
        self._restart()

    def _restart(self) -> None:
        self._matcher.reset()
        self._count = 0  # tokens of the answer that were read
        self._recent: list[int] = []  # the last tokens, while a mark is awaited
        self._awaited = self._marks.think_end if self._thinks else self._call_start  # else the grammar applies
        self._ended = False
        self._is_next_free = False  # whether the next token may show that a mark was only mentioned
        self.error: str | None = None

    def copy(self) -> "Constraint":
        """Return a constraint for another answer to the same prompt, before either has started."""
        return Constraint(
            self._grammar, self._marks, thinks=self._thinks, call_start=self._call_start, param=self.param
        )

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Set the logits [1, V] of tokens that may not follow `tokens` [N] to -inf."""
        mx.async_eval(logits)  # type: ignore[no-untyped-call] # the model computes while the mask is made
        self._read(tokens)
        if self._ended or self._awaited or self._is_next_free or self.error is not None:
            return logits
        grammar, started = self._grammar, time.thread_time()  # which other work does not change
        mask = self._matcher.compute_bitmask()
        grammar.mask_seconds += time.thread_time() - started
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
        """Raise `GrammarError` if a mandatory grammar cannot be matched."""
        if self.error is not None and not self._call_start:
            raise GrammarError(f"the answer cannot follow its grammar any further: {self.error}")

    def _read(self, tokens: mx.array) -> None:
        """Read what was generated since the last call."""
        if self._prompt_tokens is None:
            self._prompt_tokens = tokens.size
        count = tokens.size - self._prompt_tokens
        if count < self._count:  # an answer that continues after a memory error
            self._restart()
        generated: Any = tokens[self._prompt_tokens + self._count :].tolist() if count > self._count else []
        for token in generated:
            self._count += 1
            self._consume(token)

    def _consume(self, token: int) -> None:
        if token in self._marks.eos_ids:
            self._ended = True
        elif self.error is None and self._awaited:
            self._await(token)
        elif self._is_next_free and not self._matcher.try_consume_tokens([token]):
            self._restart_search()
            self._await(token)
        elif self.error is None:
            if not self._is_next_free:
                self._matcher.consume_token(token)
            self._is_next_free = False
            self._take_error()
            if self._call_start and self._matcher.is_stopped():
                self._restart_search()

    def _restart_search(self) -> None:
        self._matcher.reset()
        self._awaited, self._is_next_free = self._call_start, False

    def _await(self, token: int) -> None:
        """Look for the awaited mark at the end of the text; what follows it in the same token is read, too."""
        marks, awaited = self._marks, self._awaited
        self._recent = [*self._recent, token][-max(len(awaited), len(marks.think_start)) :]
        text = marks.decode(self._recent)
        is_beginning = len(self._recent) == self._count and awaited == self._call_start
        if is_beginning and marks.think_start and text.lstrip().startswith(marks.think_start):
            self._awaited, self._recent = marks.think_end, []
            return
        if awaited == self._call_start and awaited in marks.token_ids:
            if token == marks.token_ids[awaited]:
                self._awaited, self._recent = "", []
            return
        _, mark, rest = text.partition(awaited)
        if not mark:
            return
        self._recent = []
        self._awaited = self._call_start if awaited == marks.think_end else ""
        following = marks.tokenizer.tokenize_str(rest.lstrip())
        if self._awaited:
            return
        if self._matcher.try_consume_tokens(following) == len(following):
            self._is_next_free = bool(self._call_start) and not following
        elif self._call_start:  # the mark was only mentioned
            self._restart_search()
        else:
            self.error = f"{rest[:20]!r} after the reasoning does not match the grammar"

    def _take_error(self) -> None:
        if self._matcher.is_error():
            self.error = shorten_message(self._matcher.get_error())
            if self._call_start:
                log.warning("a tool call continues unconstrained: %s", self.error)


class Grammars:
    """Compiles schemas and grammars for mlx-lm's tokenizer, whose vocabulary takes half a second to load."""

    def __init__(self, tokenizer: Any) -> None:
        self._marks: AnswerMarks | None = None  # None if there are no grammars for the tokenizer
        self._checker: GrammarChecker | None = None
        self._results: OrderedDict[GrammarSource, GrammarError | int] = OrderedDict()
        self._matchers: OrderedDict[GrammarSource, LLMatcher] = OrderedDict()  # agents send the same tools each time
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
            text, eos_ids = str(backend.to_str()), frozenset(tokenizer.eos_token_ids)  # with the added tokens
            vocabulary = LLTokenizer(text, eos_token=sorted(eos_ids))
            think_start, think_end = tokenizer.think_start or "", tokenizer.think_end or ""
            token_ids = {token.content: id for id, token in tokenizer.added_tokens_decoder.items()}
            self._marks = AnswerMarks(eos_ids, think_start, think_end, tokenizer.decode, vocabulary, token_ids)
            self._checker = GrammarChecker(text, sorted(eos_ids))

    async def compile(self, source: GrammarSource) -> CompiledGrammar:
        """Compile a grammar after a separate process has test-compiled it; raise `GrammarError` if it fails there.

        Results of the test are cached, except for exceeded limits.
        """
        if self._marks is None or self._checker is None:
            raise GrammarError("this model's tokenizer does not support grammars; ask for plain text")
        if source not in self._results:
            self._results[source] = await self._checker.check(source)
            if len(self._results) > _MAX_CACHED:
                self._results.popitem(last=False)
        self._results.move_to_end(source)
        result = self._results[source]
        if isinstance(result, GrammarError):
            raise GrammarError(str(result), result.path)
        matcher = self._matchers.pop(source, None)
        if matcher is None:
            loop = asyncio.get_running_loop()
            matcher = await loop.run_in_executor(self._compiler, compile_grammar, source, self._marks.tokenizer)
        if result <= _MAX_KEPT_BYTES:
            self._matchers[source] = matcher
            while len(self._matchers) > _MAX_KEPT:
                self._matchers.popitem(last=False)
        return CompiledGrammar(matcher, result)

    def constraint(self, grammar: CompiledGrammar, **options: Any) -> Constraint:
        """Return a constraint for one answer, with the options of `Constraint`."""
        assert self._marks is not None  # noqa: S101 - tells the type checker
        return Constraint(grammar, self._marks, **options)

    def close(self) -> None:
        if self._checker is not None:
            self._checker.close()
