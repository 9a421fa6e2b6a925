"""`make_argument_schema`: the parameters of a tool as a schema that grammars can follow."""

import json
from typing import Any

from mlx_tq.grammar.grammar_source import JSON_SEPARATORS, GrammarError, subschemas

Schema = dict[str, Any]

_ANNOTATIONS = ("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly")
_IDENTITY = ("$schema", "$id", "$comment", "x-guidance")
_DEFINITIONS = ("$defs", "definitions")
_COMBINATORS = ("allOf", "anyOf", "oneOf", "$ref")
_OPEN = (*_COMBINATORS, "patternProperties")  # objects with these may have other properties than the listed ones
# Formats of strings that grammars follow. Others are annotations, as JSON Schema has them.
_FORMATS = frozenset(("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"))


def make_argument_schema(parameters: Schema | None) -> Schema:
    """Return the schema of a call's arguments.

    Set `additionalProperties` to false where it is missing from an object that lists its properties, so that a model
    cannot add properties forever. Definitions are at the root, where references look for them. Annotations are removed.
    """
    schema: Schema = json.loads(json.dumps(parameters or {"properties": {}}))
    definitions: dict[str, Schema] = {}
    waiting = [(schema, True)]
    while waiting:
        part, is_closed = waiting.pop()
        waiting += [(inner, _closes(part, step[0])) for step, inner in subschemas(part)]
        for keyword in _DEFINITIONS:
            if isinstance(named := part.pop(keyword, None), dict):
                definitions[keyword] = named | definitions.get(keyword, {})
        _simplify(part)
        if is_closed and "properties" in part and not any(name in part for name in _OPEN):
            part.setdefault("additionalProperties", False)
    if not any(name in schema for name in _COMBINATORS):
        schema.setdefault("type", "object")
    if schema.get("type", "object") != "object":
        raise GrammarError(f"the type of a tool's parameters is {str(schema['type'])[:64]!r}; it must be 'object'")
    return {"x-guidance": JSON_SEPARATORS, **schema, **definitions}


def _closes(part: Schema, keyword: str) -> bool:
    """Return whether a subschema may be closed: siblings of `allOf` and similar keywords may define more properties."""
    return keyword != "allOf" and not (keyword in _COMBINATORS and "properties" in part)


def _simplify(part: Schema) -> None:
    """Remove what does not change which values are valid."""
    for name in (*_ANNOTATIONS, *_IDENTITY):
        part.pop(name, None)
    if part.get("format") not in _FORMATS:
        part.pop("format", None)
    names = part.get("propertyNames")
    if isinstance(names, dict) and {k: v for k, v in names.items() if k not in _ANNOTATIONS} == {"type": "string"}:
        del part["propertyNames"]
