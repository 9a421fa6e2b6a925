"""`CallForm`: how a model writes tool calls. `write_grammar` writes the grammar of answers with calls of that form."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.tool_parsers import json_tools

from mlx_tq.grammar.argument_schema import Schema, make_argument_schema
from mlx_tq.grammar.grammar_source import JSON_SEPARATORS, GrammarError, GrammarSource

_IDENTIFIER = re.compile(r"[^\W\d]\w*", re.ASCII)
_NOTHING = '""'
_NAME = re.compile(r"[\w.-]+", re.ASCII)  # that every form can show


@dataclass(frozen=True)
class CallForm:
    """The marks around calls, and the function that parses what is between them; `parser` is its name in mlx-lm."""

    parser: str
    start: str
    end: str
    parse: Callable[[str, Any], Any]

    @classmethod
    def of(cls, tokenizer: Any) -> "CallForm | None":
        """Return the form of a model's calls, or None if mlx-lm cannot parse them."""
        if not tokenizer.has_tool_calling:
            return None
        parse = tokenizer.tool_parser
        return cls(parse.__module__.rpartition(".")[2], tokenizer.tool_call_start, tokenizer.tool_call_end, parse)


GENERIC_FORM = CallForm("json_tools", json_tools.tool_call_start, json_tools.tool_call_end, json_tools.parse_tool_call)


@dataclass(frozen=True)
class Tool:
    name: str
    parameters: Schema | None


class ToolError(GrammarError):
    """No grammar can be written for the calls of `tool`."""

    def __init__(self, message: str, tool: Tool, path: tuple[str, ...] = ()) -> None:
        super().__init__(message, path)
        self.tool = tool


def find_special_tokens(tokenizer: Any) -> dict[str, int]:
    """Map control tokens to their ids; a grammar must refer to them by id, as ordinary text cannot match them."""
    return {token.content: id for id, token in tokenizer.added_tokens_decoder.items() if token.special}


def write_grammar(
    form: CallForm,
    tools: Sequence[Tool],
    special: Mapping[str, int],
    *,
    is_opened: bool = False,
    one_call: bool = False,
    response_format: GrammarSource | None = None,
) -> GrammarSource:
    """Return the grammar of answers that consist of calls; raise `GrammarError` if the form cannot be constrained.

    With `is_opened`, it describes what follows the start mark of one or more calls up to their end mark. With
    `response_format`, an answer may match that instead.
    """
    shape = _SHAPES.get(form.parser)
    if shape is None:
        raise GrammarError(
            f"tool calls of mlx-lm's parser {form.parser} cannot be constrained; supported parsers: "
            f"{', '.join(sorted(_SHAPES))}. Send tool_choice 'auto', and no response_format"
        )
    rules = _Rules(special, form.end)
    if form.parser == "mistral" and "[ARGS]" not in special:
        shape = _Shape(_write_json, "[", "]", ", ")
    names = []
    for tool in tools:
        try:
            if not _NAME.fullmatch(tool.name):
                raise GrammarError("a tool's name may have letters, digits, '_', '-' and '.'")
            names.append(rules.add(shape.write(rules, tool.name, make_argument_schema(tool.parameters))))
        except GrammarError as error:
            raise ToolError(str(error), tool, error.path) from error
        except (TypeError, AttributeError) as error:  # a schema of a shape that no check has foreseen
            raise ToolError(f"the schema cannot be read: {error}", tool) from error
    call = rules.add(" | ".join(names))
    if shape.between is not None and not one_call:
        call = f"{call} ({rules.text(shape.between)} {call})*"
    marked = " ".join([rules.text(shape.before), call, rules.text(shape.after), rules.text(form.end)])
    if not is_opened:
        marked = rules.add(f"{rules.text(form.start)} {marked}")
        if shape.between is None and not one_call:
            marked = f'{marked} ("\\n"? {marked})*'
    if response_format is not None:
        marked += f" | {rules.text_of(response_format)}"
    return GrammarSource("tool_calls", "\n".join([f"start: {marked}", *rules.lines]))


class _Rules:
    """Rules of a grammar, and the expressions that refer to them."""

    def __init__(self, special: Mapping[str, int], end_mark: str) -> None:
        self._special, self._end_mark = special, end_mark
        self.lines: list[str] = []
        self._raw: dict[str, str] = {}

    def add(self, expression: str, attributes: str = "") -> str:
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{attributes}: {expression}")
        return name

    def text(self, text: str) -> str:
        """Return the expression of a fixed text, with control tokens by their ids."""
        marks = sorted((mark for mark in self._special if mark in text), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
        return " ".join(
            f"<[{self._special[part]}]>" if part in marks else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )

    def json(self, schema: Schema) -> str:
        return self.add(f"%json {GrammarSource.of_schema(schema).text}")

    def raw(self, end: str) -> str:
        """Return the expression of any text up to `end`, and `end`; it may not contain the mark after calls."""
        if end not in self._raw:
            excluded = f" & ~/(?s:.*){_in_slashes(re.escape(self._end_mark))}(?s:.*)/" if self._end_mark else ""
            expression, is_special = f"/(?s:.*)/{excluded}", any(mark in end for mark in self._special)
            if is_special:
                self._raw[end] = f"{self.add(expression)} {self.text(end)}"
            else:
                self._raw[end] = self.add(expression, f"[suffix={json.dumps(end)}]")
        return self._raw[end]

    def text_of(self, source: GrammarSource) -> str:
        """Return the expression of a response format."""
        if source.syntax == "json_schema":
            schema = json.loads(source.text)
            return self.add(f"%json {json.dumps({**schema, 'x-guidance': JSON_SEPARATORS})}")
        if source.syntax == "regex":
            return self.add(f"/{_in_slashes(source.text)}/")
        raise GrammarError("a Lark grammar cannot be combined with tools")


def _in_slashes(pattern: str) -> str:
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern).replace("\n", r"\n")


# The forms. A function writes one call: its name, and its arguments.


@dataclass(frozen=True)
class _Shape:
    """One call, and what is around calls between their marks; `between` is None if each has its own marks."""

    write: Callable[[_Rules, str, Schema], str]
    before: str = ""
    after: str = ""
    between: str | None = None


def _write_json(rules: _Rules, name: str, schema: Schema) -> str:
    start = rules.text(f'{{"name": {json.dumps(name)}, "arguments": ')
    return f"{start} {rules.json(schema)} {rules.text('}')}"


def _write_json_on_lines(rules: _Rules, name: str, schema: Schema) -> str:
    return f'"\\n"? {_write_json(rules, name, schema)} "\\n"?'


def _write_mistral(rules: _Rules, name: str, schema: Schema) -> str:
    return f"{rules.text(f'{name}[ARGS]')} {rules.json(schema)}"


def _write_kimi(rules: _Rules, name: str, schema: Schema) -> str:
    start, middle = rules.text(f"<|tool_call_begin|>functions.{name}:"), rules.text("<|tool_call_argument_begin|>")
    return f"{start} /[0-9]{{1,3}}/ {middle} {rules.json(schema)} {rules.text('<|tool_call_end|>')}"


def _write_keywords(rules: _Rules, name: str, schema: Schema) -> str:
    """Write a call of Python with keyword arguments. What is optional may be left out."""
    if not all(_IDENTIFIER.fullmatch(part) for part in name.split(".")):
        raise GrammarError("a tool's name must be an identifier in this form of calls")
    first = following = ""  # the arguments from here on: before any other, and after one
    for key, value, is_required in reversed(list(_properties(schema))):
        if not _IDENTIFIER.fullmatch(key):
            raise GrammarError("a parameter's name must be an identifier in this form of calls", ("properties", key))
        argument = f"{rules.text(f'{key}=')} {rules.json(value)}"
        others = "" if is_required else f" | {first or _NOTHING}"
        first = rules.add(f"{argument} {following}{others}")
        following = rules.add(f'(", " {argument}){"" if is_required else "?"} {following}')
    return f"{rules.text(f'{name}(')} {first} {rules.text(')')}"


def _tagged(call: str, key: str, after_key: str, value_end: str, end: str) -> Callable[[_Rules, str, Schema], str]:
    """Return the function for arguments between tags; strings are raw text, other values are JSON."""

    def write(rules: _Rules, name: str, schema: Schema) -> str:
        parts = [rules.text(call.format(name))]
        if "properties" not in schema and schema.get("additionalProperties") is not False:
            before, after = (rules.text(part) for part in (key, after_key))
            parts.append(f"({before} /[A-Za-z0-9_.-]+/ {after} {rules.raw(value_end)})*")
        for parameter, value, is_required in _properties(schema):
            tag = rules.text(f"{key}{parameter}{after_key}")
            parts.append(f"({tag} {_tagged_value(rules, value, value_end)}){'' if is_required else '?'}")
        return " ".join(part for part in (*parts, rules.text(end)) if part)

    return write


def _tagged_value(rules: _Rules, schema: Schema, end: str) -> str:
    options = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if options and all(isinstance(option, str) for option in options):
        return f"({' | '.join(rules.text(option) or _NOTHING for option in options)}) {rules.text(end)}"
    return rules.raw(end) if _may_be_string(schema) else f"{rules.json(schema)} {rules.text(end)}"


def _may_be_string(schema: Schema) -> bool:
    """Return whether a value may be a string; one without any type is read as text too."""
    parts = [part for name in ("anyOf", "oneOf") for part in schema.get(name, []) if isinstance(part, dict)]
    if parts:
        return any(map(_may_be_string, parts))
    return "string" in schema["type"] if "type" in schema else not {"$ref", "allOf", "enum", "const"} & {*schema}


def _properties(schema: Schema) -> Iterator[tuple[str, Schema, bool]]:
    """Yield names, schemas and whether they are required; each schema has the definitions of all."""
    if wrong := [name for name in ("allOf", "anyOf", "oneOf", "$ref", "patternProperties") if name in schema]:
        raise GrammarError(f"parameters with {wrong[0]} are not supported in this form of calls", (wrong[0],))
    shared: Schema = {name: schema[name] for name in ("x-guidance", "$defs", "definitions") if name in schema}
    required = schema.get("required", [])
    properties = {**schema.get("properties", {}), **{k: {} for k in required if k not in schema.get("properties", {})}}
    for name, value in properties.items():
        yield name, {**shared, **(value if isinstance(value, dict) else {})}, name in required


_GLM = _Shape(_tagged("{}", "<arg_key>", "</arg_key><arg_value>", "</arg_value>", ""))
_SHAPES = {
    "json_tools": _Shape(_write_json_on_lines),
    "mistral": _Shape(_write_mistral),
    "kimi_k2": _Shape(_write_kimi, between=""),
    "pythonic": _Shape(_write_keywords, "[", "]", ", "),
    "glm47": _GLM,
    "laguna": _GLM,
    "qwen3_coder": _Shape(_tagged("\n<function={}>\n", "<parameter=", ">\n", "\n</parameter>\n", "</function>\n")),
    "minimax_m2": _Shape(
        _tagged('<invoke name="{}">\n', '<parameter name="', '">', "</parameter>\n", "</invoke>\n"), "\n", between=""
    ),
    "minicpm5": _Shape(_tagged('"{}">', '<param name="', '">', "</param>", "")),
}
