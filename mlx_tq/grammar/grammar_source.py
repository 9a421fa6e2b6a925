"""`GrammarSource`: a JSON schema, regular expression, Lark grammar or tool calls, and how llguidance reads it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from llguidance import LLMatcher

from mlx_tq.errors import ConfigError

MAX_TEXT = 2**16  # characters
_MAX_TOOLS = 2**18  # characters of the grammar of all tools of a request

# "tool_calls" is Lark of our own.
Syntax = Literal["json_schema", "regex", "lark", "tool_calls"]

# Separators as Python's json writes them, on one line: where blanks are free, a small model adds them forever.
JSON_SEPARATORS: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# llguidance follows forced bytes before it returns a mask. Adjacent terminals with no separator (`T T` with `T: /b+/`)
# can force a byte forever. JSON schemas have separators and a regex is a single terminal, so forcing stays on for both:
# without it, SmolLM2 needs 15 % more tokens for the same JSON.
_NO_FORCING = '%llguidance {"no_forcing": true}'
_MAX_PARTS = 16  # of an allOf; each part can double the time and memory of compiling
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# llguidance overflows the stack on integers that round to -2^63 in float64; integers up to this value do.
_TOO_LOW = -(2**63) + 512

Subschema = tuple[tuple[str, ...], dict[str, Any]]  # the path of keys and indices, and the schema


class GrammarError(ConfigError):
    """A schema or grammar cannot be followed; `path` leads to the error inside the schema."""

    def __init__(self, message: str, path: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.path = path


@dataclass(frozen=True)
class GrammarSource:
    """A schema or grammar as its author wrote it; raises `GrammarError` if it is known to be fatal to llguidance."""

    syntax: Syntax
    text: str

    def __post_init__(self) -> None:
        if self.syntax == "tool_calls" and len(self.text) > _MAX_TOOLS:
            raise GrammarError(
                f"the grammar generated from the tools exceeds {_MAX_TOOLS:,} characters; send fewer or simpler tools"
            )
        if self.syntax != "tool_calls" and len(self.text) > MAX_TEXT:
            raise GrammarError(f"it has more than {MAX_TEXT:,} characters, the limit")
        if self.syntax == "lark" and "%llguidance" in self.text:
            raise GrammarError("%llguidance options are not allowed; remove them")
        schema = json.loads(self.text) if self.syntax == "json_schema" else None
        waiting: list[Subschema] = [((), schema)] if isinstance(schema, dict) else []
        while waiting:
            path, part = waiting.pop()
            # Naming what is known to be fatal makes a better message than the crash of the compiler.
            if isinstance(parts := part.get("allOf"), list) and len(parts) > _MAX_PARTS:
                raise GrammarError(f"allOf has {len(parts):,} parts; the limit is {_MAX_PARTS}", path)
            for keyword in ("const", "enum", *(() if part.get("type") == "number" else _BOUNDS)):
                for number in _numbers(part.get(keyword)):
                    if number <= _TOO_LOW:
                        message = f"{keyword} contains {number!s:.24}; integers must be above {_TOO_LOW}"
                        raise GrammarError(message, path)
            waiting += [((*path, *step), inner) for step, inner in subschemas(part)]

    @classmethod
    def of_schema(cls, schema: dict[str, Any]) -> "GrammarSource":
        """Make the source of a schema; raise `GrammarError` as soon as its text is too long."""
        text = ""
        for part in json.JSONEncoder().iterencode(schema):
            text += part
            if len(text) > MAX_TEXT:
                raise GrammarError(f"it has more than {MAX_TEXT:,} characters, the limit")
        return cls("json_schema", text)

    def to_llguidance(self) -> str:
        """Return llguidance's format; raise `ValueError` if the schema is nested too deeply."""
        if self.syntax == "tool_calls":
            return self.text
        if self.syntax == "lark":
            return f"{self.text}\n{_NO_FORCING}"
        if self.syntax == "regex":
            return LLMatcher.grammar_from_regex(self.text)
        return LLMatcher.grammar_from_json_schema(self.text, overrides=JSON_SEPARATORS)


def subschemas(schema: dict[str, Any]) -> Iterator[Subschema]:
    for keyword in ("$defs", "definitions", "properties", "patternProperties"):
        if isinstance(named := schema.get(keyword), dict):
            yield from (((keyword, name), part) for name, part in named.items() if isinstance(part, dict))
    for keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if isinstance(listed := schema.get(keyword), list):
            yield from (((keyword, str(n)), part) for n, part in enumerate(listed) if isinstance(part, dict))
    for keyword in ("items", "additionalProperties", "not"):
        if isinstance(part := schema.get(keyword), dict):
            yield (keyword,), part


def _numbers(value: Any) -> Iterator[int | float]:
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict | list):
            waiting += part.values() if isinstance(part, dict) else part
        elif isinstance(part, int | float) and not isinstance(part, bool):
            yield part
