"""How the calls of each of mlx-lm's parsers are written: a function writes one call, its name and its arguments."""

import ast
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mlx_tq.grammar.argument_schema import Schema, named_properties
from mlx_tq.grammar.gemma_values import GemmaValues
from mlx_tq.grammar.grammar_rules import NOTHING, Rules
from mlx_tq.grammar.grammar_source import GrammarError

_IDENTIFIER = re.compile(r"[^\W\d]\w*", re.ASCII)
_GEMMA_NAME = re.compile(r"[\w-]+", re.ASCII)
_K3_TYPES = "/number|boolean|null|object|array/"
_ANY_TEXT = "/(?s:.*)/"
_NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?"
_NOT_JSON = f'{_ANY_TEXT} & ~/\\s*([\\[{{"](?s:.*)|true|false|null|NaN|-?Infinity|{_NUMBER})\\s*(<(?s:.*))?/'


@dataclass(frozen=True)
class Shape:
    """How one call is written, and the text before, after and between calls.

    `between` is None if each call has its own start and end marks.
    """

    write: Callable[[Rules, str, Schema], str]
    before: str = ""
    after: str = ""
    between: str | None = None


def write_json(rules: Rules, name: str, schema: Schema) -> str:
    start = rules.text(f'{{"name": {json.dumps(name)}, "arguments": ')
    return f"{start} {rules.json(schema)} {rules.text('}')}"


def _write_json_on_lines(rules: Rules, name: str, schema: Schema) -> str:
    return f'"\\n"? {write_json(rules, name, schema)} "\\n"?'


def _write_mistral(rules: Rules, name: str, schema: Schema) -> str:
    return f"{rules.text(f'{name}[ARGS]')} {rules.json(schema)}"


def _write_kimi(rules: Rules, name: str, schema: Schema) -> str:
    start, middle = rules.text(f"<|tool_call_begin|>functions.{name}:"), rules.text("<|tool_call_argument_begin|>")
    return f"{start} /[0-9]{{1,3}}/ {middle} {rules.json(schema)} {rules.text('<|tool_call_end|>')}"


def _write_keywords(rules: Rules, name: str, schema: Schema) -> str:
    """Write a call of Python with keyword arguments."""
    for part in name.split("."):
        _check_name(_IDENTIFIER, part)
    arguments = []
    for key, value, is_required in _properties(schema):
        _check_name(_IDENTIFIER, key, "properties", key)
        arguments.append((f"{rules.text(f'{key}=')} {rules.json(value)}", is_required))
    return f"{rules.text(f'{name}(')} {rules.separated(arguments, ', ')} {rules.text(')')}"


def _write_kimi_k3(rules: Rules, name: str, schema: Schema) -> str:
    """Write a call whose arguments have their types in their tags, or one object of JSON."""
    tag, close = f'<|open|>call tool="{name}" index="', "<|close|>argument<|sep|>"
    parts = [rules.text(tag), "/[0-9]{1,3}/", rules.text('"<|sep|>')]
    if "properties" not in schema and schema.get("additionalProperties") is not False:
        before, after = rules.text('<|open|>json type="object"<|sep|>'), rules.text("<|close|>json<|sep|>")
        parts.append(f"{before} {rules.json(schema)} {after}")
    for parameter, value, is_required in _properties(schema):
        key = parameter.replace("&", "&amp;").replace('"', "&quot;")
        before = rules.text(f'<|open|>argument key="{key}" type="')
        options, after = [], '"<|sep|>'
        if _may_be_string(value) or _only_strings(value):
            options.append(f"{rules.text(f'string{after}')} {_tagged_value(rules, value, close)}")
        if not _only_strings(value):
            options.append(f"{_K3_TYPES} {rules.text(after)} {rules.json(value)} {rules.text(close)}")
        parts.append(f"({before} ({' | '.join(options)})){'' if is_required else '?'}")
    return " ".join([*parts, rules.text("<|close|>call<|sep|>")])


def _write_gemma(rules: Rules, name: str, schema: Schema) -> str:
    _check_name(_GEMMA_NAME, name)
    _check_parameters(schema)
    return f"{rules.text(f'call:{name}')} {GemmaValues(rules, schema).object(schema)}"


def _write_function_gemma(rules: Rules, name: str, schema: Schema) -> str:
    """Write a call whose arguments are strings without braces, numbers and booleans."""
    _check_name(_IDENTIFIER, name)
    arguments, quote = [], "<escape>"
    for key, value, is_required in _properties(schema):
        _check_name(_IDENTIFIER, key, "properties", key)
        types = value.get("type")
        if any("}" in option or quote in option for option in _string_options(value)):
            raise GrammarError(
                f"an option with '}}' or {quote} is not supported in this call format", ("properties", key)
            )
        if _only_strings(value):
            text = f"{rules.text(quote)} {_tagged_value(rules, value, quote, '/[^}]*/')}"
        elif types in ("number", "integer", "boolean"):
            text = rules.json(value)
        else:
            message = f"arguments of type {str(types)[:64]!r} are not supported in this call format"
            raise GrammarError(message, ("properties", key))
        arguments.append((f"{rules.text(f'{key}:')} {text}", is_required))
    return f"{rules.text(f'call:{name}{{')} {rules.separated(arguments, ',')} {rules.text('}')}"


def _write_longcat(rules: Rules, name: str, schema: Schema) -> str:
    """Write arguments between tags, or JSON where mlx-lm would not read the tags so.

    It reads no call without arguments, and only strings whose type is exactly that as text.
    """

    def is_read(value: Schema) -> bool:
        if value.get("type") == "string" or not (_may_be_string(value) or _string_options(value)):
            return True
        return bool(_string_options(value)) and not any(map(_is_literal, _string_options(value)))

    has_tags = bool(schema.get("required")) and all(is_read(value) for _, value, _ in _properties(schema))
    return _LONGCAT_TAGS(rules, name, schema) if has_tags else write_json(rules, name, schema)


def _tagged(
    call: str,
    key: str,
    after_key: str,
    value_end: str,
    end: str,
    write_value: Callable[[Rules, Schema, str], str] | None = None,
) -> Callable[[Rules, str, Schema], str]:
    """Return the function for arguments between tags, whose values are those of `_tagged_value` by default."""
    write_value = write_value or _tagged_value

    def write(rules: Rules, name: str, schema: Schema) -> str:
        parts = [rules.text(call.format(name))]
        if "properties" not in schema and schema.get("additionalProperties") is not False:
            before, after = (rules.text(part) for part in (key, after_key))
            parts.append(f"({before} /[A-Za-z0-9_.-]+/ {after} {rules.raw(value_end)})*")
        for parameter, value, is_required in _properties(schema):
            tag = rules.text(f"{key}{parameter}{after_key}")
            parts.append(f"({tag} {write_value(rules, value, value_end)}){'' if is_required else '?'}")
        return " ".join(part for part in (*parts, rules.text(end)) if part)

    return write


def _tagged_value(rules: Rules, schema: Schema, end: str, body: str = _ANY_TEXT) -> str:
    """Write a value up to `end`: a string as raw text, another as JSON."""
    if options := _string_options(schema):
        return f"({' | '.join(rules.text(option) or NOTHING for option in options)}) {rules.text(end)}"
    return rules.raw(end, body) if _may_be_string(schema) else f"{rules.json(schema)} {rules.text(end)}"


def _tagged_json(rules: Rules, schema: Schema, end: str) -> str:
    """Write a value up to `end` for a parser that reads it as JSON if it can: only other text may be raw."""
    options = [option for option in _string_options(schema) if not _is_literal(option)]
    values = [f"{rules.text(option) or NOTHING} {rules.text(end)}" for option in options]
    if _may_be_string(schema) and not _string_options(schema):
        values.append(rules.raw(end, _NOT_JSON))
    return f"({' | '.join([*values, f'{rules.json(schema)} {rules.text(end)}'])})"


def _string_options(schema: Schema) -> list[str]:
    """Return the strings of which a value must be one, none if it may be something else."""
    options = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return options if all(isinstance(option, str) for option in options) else []


def _is_literal(text: str) -> bool:
    """Return whether a text is JSON or a literal of Python."""
    for read in (json.loads, ast.literal_eval):
        try:
            read(text.strip())
        except (ValueError, SyntaxError):
            continue
        return True
    return False


def _only_strings(schema: Schema) -> bool:
    return schema.get("type") == "string" or bool(_string_options(schema))


def _check_name(pattern: re.Pattern[str], name: str, *path: str) -> None:
    if not pattern.fullmatch(name):
        kind = "a parameter's" if path else "a tool's"
        raise GrammarError(f"{kind} name must be an identifier in this call format", path)


def _may_be_string(schema: Schema) -> bool:
    """Return whether a value may be a string; one without any type is read as text too."""
    parts = [part for name in ("anyOf", "oneOf") for part in schema.get(name, []) if isinstance(part, dict)]
    if parts:
        return any(map(_may_be_string, parts))
    return "string" in schema["type"] if "type" in schema else not {"$ref", "allOf", "enum", "const"} & {*schema}


def _check_parameters(schema: Schema) -> None:
    """Raise `GrammarError` unless parameters are a list of properties, or any."""
    if wrong := [name for name in ("allOf", "anyOf", "oneOf", "$ref", "patternProperties") if name in schema]:
        raise GrammarError(f"parameters with {wrong[0]} are not supported in this call format", (wrong[0],))


def _properties(schema: Schema) -> Iterator[tuple[str, Schema, bool]]:
    """Yield names, schemas and whether they are required; each schema has the definitions of all."""
    _check_parameters(schema)
    shared: Schema = {name: schema[name] for name in ("x-guidance", "$defs", "definitions") if name in schema}
    required = schema.get("required", [])
    for name, value in named_properties(schema).items():
        yield name, {**shared, **(value if isinstance(value, dict) else {})}, name in required


_LONGCAT_TAGS = _tagged(
    "{}\n", "<longcat_arg_key>", "</longcat_arg_key>\n<longcat_arg_value>", "</longcat_arg_value>\n", ""
)
_MUSE_TAGS = _tagged(
    *('<atem:invoke name="{}">\n', '<atem:parameter name="', '">', "</atem:parameter>\n", "</atem:invoke>\n"),
    _tagged_json,
)
_GLM = Shape(_tagged("{}", "<arg_key>", "</arg_key><arg_value>", "</arg_value>", ""))
SHAPES = {
    "json_tools": Shape(_write_json_on_lines),
    "mistral": Shape(_write_mistral),
    "kimi_k2": Shape(_write_kimi, between=""),
    "kimi_k3": Shape(_write_kimi_k3, between=""),
    "gemma4": Shape(_write_gemma),
    "function_gemma": Shape(_write_function_gemma),
    "longcat": Shape(_write_longcat),
    "muse_spark": Shape(_MUSE_TAGS, "\n", between=""),
    "pythonic": Shape(_write_keywords, "[", "]", ", "),
    "glm47": _GLM,
    "laguna": _GLM,
    "qwen3_coder": Shape(_tagged("\n<function={}>\n", "<parameter=", ">\n", "\n</parameter>\n", "</function>\n")),
    "minimax_m2": Shape(
        _tagged('<invoke name="{}">\n', '<parameter name="', '">', "</parameter>\n", "</invoke>\n"), "\n", between=""
    ),
    "minicpm5": Shape(_tagged('"{}">', '<param name="', '">', "</param>", "")),
}
