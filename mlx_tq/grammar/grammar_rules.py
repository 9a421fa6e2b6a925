"""`Rules`: the rules of a Lark grammar, as they are written."""

import json
import re
from collections.abc import Mapping, Sequence

from mlx_tq.grammar.argument_schema import Schema
from mlx_tq.grammar.grammar_source import JSON_SEPARATORS, GrammarError, GrammarSource

NOTHING = '""'


class Rules:
    """Rules of a grammar, and the expressions that refer to them."""

    def __init__(self, special: Mapping[str, int], end_mark: str) -> None:
        self._special, self._end_mark = special, end_mark
        self.lines: list[str] = []
        self._count = 0  # of rules
        self._raw: dict[tuple[str, str], str] = {}

    def add(self, expression: str, attributes: str = "") -> str:
        name = self.name()
        self.lines.append(f"{name}{attributes}: {expression}")
        return name

    def name(self) -> str:
        """Return the name of a rule that is added to `lines` later, as it refers to itself."""
        self._count += 1
        return f"r{self._count}"

    def text(self, text: str) -> str:
        """Return the expression of a fixed text, with control tokens by their ids."""
        marks = sorted((mark for mark in self._special if mark in text), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
        return " ".join(
            f"<[{self._special[part]}]>" if part in marks else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )

    def separated(self, parts: Sequence[tuple[str, bool]], separator: str) -> str:
        """Return the expression of parts in their order; each is an expression, and whether it is required."""
        separator = self.text(separator)
        first = following = ""  # the parts from here on: before any other, after one
        for part, is_required in reversed(parts):
            others = "" if is_required else f" | {first or NOTHING}"
            first = self.add(f"{part} {following}{others}")
            following = self.add(f"({separator} {part}){'' if is_required else '?'} {following}")
        return first

    def json(self, schema: Schema) -> str:
        return self.add(f"%json {GrammarSource.of_schema(schema).text}")

    def raw(self, end: str, body: str = "/(?s:.*)/") -> str:
        """Return the expression of any text up to `end`, and `end`; it may not contain the mark after calls.

        `body` is the expression of that text.
        """
        if (end, body) not in self._raw:
            excluded = f" & ~/(?s:.*){in_slashes(re.escape(self._end_mark))}(?s:.*)/" if self._end_mark else ""
            expression, is_special = f"{body}{excluded}", any(mark in end for mark in self._special)
            if is_special:
                token = self.name().upper()  # only tokens may exclude something
                self.lines.append(f"{token}: {expression}")
                self._raw[end, body] = f"{token} {self.text(end)}"
            else:
                self._raw[end, body] = self.add(expression, f"[suffix={json.dumps(end)}]")
        return self._raw[end, body]

    def text_of(self, source: GrammarSource) -> str:
        """Return the expression of a response format."""
        if source.syntax == "json_schema":
            schema = json.loads(source.text)
            return self.add(f"%json {json.dumps({**schema, 'x-guidance': JSON_SEPARATORS})}")
        if source.syntax == "regex":
            return self.add(f"/{in_slashes(source.text)}/")
        raise GrammarError("a Lark grammar cannot be combined with tools")


def in_slashes(pattern: str) -> str:
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern).replace("\n", r"\n")
