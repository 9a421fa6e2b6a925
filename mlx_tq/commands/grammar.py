"""Answers that are held to a JSON schema, a grammar or a regular expression: at each token, only what these allow."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer

from mlx_tq.errors import ConfigError

MAX_TEXT = 2**16  # characters of a schema or grammar

# On one line, as Python's json writes it: where blanks are free, a small model adds them forever.
_JSON: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# A state takes 1 to 2 kB. Without the parser's whole state in a message.
_LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
# Compiling recurses, and a chain of references of MAX_TEXT would overflow a thread's usual stack and end the process.
_STACK = 2**28
_DEEPEST = 16  # steps into a schema that a fault's place is looked for

_NAMED = ("$defs", "definitions", "properties", "patternProperties")  # keywords that hold schemas by name
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")


class GrammarError(ConfigError):
    """A schema or grammar that cannot be followed.

    Attributes:
        place: names and numbers that lead to the fault inside the schema.
    """

    def __init__(self, message: str, place: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.place = place


class Constraint:
    """Lets one answer be only what its grammar allows; a processor of mlx-lm, which has to be the last one.

    Args:
        matcher: at the grammar's beginning.
        ends: tokens that end an answer.
        after: tokens behind which the answer begins, the end of the model's thoughts; until then all is allowed.

    Attributes:
        error: why the grammar cannot be followed any further; from then on all is allowed.
    """

    def __init__(self, matcher: LLMatcher, ends: frozenset[int], after: tuple[int, ...] = ()) -> None:
        self._matcher, self._ends, self._after = matcher, ends, after
        self._last: tuple[int, ...] = ()
        self._begun = self._ended = False
        self.error: str | None = None

    def copy(self) -> "Constraint":
        """Another answer to the same prompt, before either has begun."""
        return Constraint(self._matcher.deep_copy(), self._ends, self._after)

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """The logits [1, V] of the token behind `tokens` [N], those of a token that is not allowed at -inf."""
        mx.async_eval(logits)  # type: ignore[no-untyped-call] # the model computes while the mask is made
        if self._begun:
            last: Any = tokens[-1].item()
            self._read(last)
        self._begun = True
        if self._ended or self._after or self.error is not None:
            return logits
        mask = self._matcher.compute_bitmask()
        if self._failed():
            return logits
        allowed = np.unpackbits(np.frombuffer(mask, np.uint8), count=logits.shape[-1], bitorder="little")
        return mx.where(mx.array(allowed.view(bool)), logits, -mx.inf)

    def check(self) -> None:
        """Raise where the grammar could not be followed to its end.

        Raises:
            GrammarError: it grew too large.
        """
        if self.error is not None:
            raise GrammarError(f"the answer cannot be held to its grammar any further: {self.error}")

    def _read(self, token: int) -> None:
        if token in self._ends:
            self._ended = True
        elif self._after:
            self._last = (*self._last, token)[-len(self._after) :]
            if self._last == self._after:
                self._after = ()
        elif self.error is None:
            self._matcher.consume_token(token)
            self._failed()

    def _failed(self) -> bool:
        if self._matcher.is_error():
            self.error = _brief(self._matcher.get_error())
        return self.error is not None


class Grammars:
    """Makes constraints for a tokenizer. Takes half a second for a vocabulary of 49,152 tokens, and holds the GIL.

    Args:
        tokenizer: mlx-lm's.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer: LLTokenizer | None = None
        self._ends = frozenset(tokenizer.eos_token_ids)
        self._thoughts_end = tuple(tokenizer.think_end_tokens or ())
        self._channels = bool(tokenizer.response_transitions or tokenizer.structural_markers)
        with suppress(ValueError, RuntimeError):  # one that is written in Python, or that llguidance cannot read
            self._tokenizer = from_tokenizer(tokenizer._tokenizer, eos_token=sorted(self._ends))
        self._compiler = _deep_thread()

    def of_schema(self, schema: dict[str, Any], *, thinks: bool = False) -> Constraint:
        """An answer that a JSON schema describes.

        Args:
            schema: of draft 2020-12; a keyword that cannot be followed is refused.
            thinks: the answer begins behind the model's thoughts.

        Raises:
            GrammarError: it is no such schema, or this tokenizer cannot be held to one; says where in the schema.
        """
        _check_size(text := json.dumps(schema))
        try:
            return self._constraint(LLMatcher.grammar_from_json_schema(text, overrides=_JSON), thinks=thinks)
        except GrammarError as error:
            fault = str(error)
            place = self._compiler.submit(_place_of, schema, fault).result()
            raise GrammarError(fault, place) from None
        except ValueError as error:  # nested too deeply
            raise GrammarError(_brief(str(error))) from error

    def of_text(self, syntax: str, text: str, *, thinks: bool = False) -> Constraint:
        """An answer that a grammar ("lark") or a regular expression ("regex") describes.

        Raises:
            GrammarError: it cannot be followed.
        """
        _check_size(text)
        read = LLMatcher.grammar_from_lark if syntax == "lark" else LLMatcher.grammar_from_regex
        return self._constraint(read(text), thinks=thinks)

    def _constraint(self, grammar: str, *, thinks: bool) -> Constraint:
        tokenizer = self._tokenizer
        if tokenizer is None or self._channels:
            raise GrammarError("this model's tokenizer cannot be held to a grammar; ask for plain text")

        def make() -> LLMatcher:
            return LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)

        matcher = self._compiler.submit(make).result()
        if matcher.is_error():
            raise GrammarError(_brief(matcher.get_error()))
        return Constraint(matcher, self._ends, self._thoughts_end if thinks else ())


def _deep_thread() -> ThreadPoolExecutor:
    """One thread with a stack that no recursion of a compiler fills."""
    usual = threading.stack_size(_STACK)
    pool = ThreadPoolExecutor(1, "grammar")
    pool.submit(int).result()  # begins the thread
    threading.stack_size(usual)
    return pool


def _check_size(text: str) -> None:
    if len(text) > MAX_TEXT:
        raise GrammarError(f"it has {len(text):,} characters; at most {MAX_TEXT:,} can be followed")


def _place_of(schema: dict[str, Any], fault: str) -> tuple[str, ...]:
    """The innermost part of a schema that is refused for the same reason when it is alone with the definitions."""
    definitions: dict[str, Any] = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    part, place = schema, tuple[str, ...]()
    while len(place) < _DEEPEST:
        found = next(((step, each) for step, each in _parts(part) if _fault({**each, **definitions}) == fault), None)
        if found is None:
            break
        step, part = found
        place = (*place, *step)
    return place


def _parts(schema: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """The schemas directly inside a schema, and how each is reached."""
    for keyword in (*_NAMED, *_LISTED, *_SINGLE):
        inner = schema.get(keyword)
        if keyword in _SINGLE:
            parts: list[tuple[tuple[str, ...], Any]] = [((keyword,), inner)]
        elif keyword in _NAMED:
            parts = [((keyword, name), each) for name, each in inner.items()] if isinstance(inner, dict) else []
        else:
            parts = [((keyword, str(n)), each) for n, each in enumerate(inner)] if isinstance(inner, list) else []
        yield from ((step, each) for step, each in parts if isinstance(each, dict))


def _fault(schema: dict[str, Any]) -> str:
    grammar = LLMatcher.grammar_from_json_schema(schema, overrides=_JSON)
    return _brief(LLMatcher.validate_grammar(grammar, limits=_LIMITS))


def _brief(text: str) -> str:
    """A message of llguidance without the picture that it draws of the place."""
    first, *others = text.splitlines() or [""]
    return " ".join([first, *(line for line in others if line.startswith("error: "))])[:200]
