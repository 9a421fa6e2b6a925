"""`make_argument_schema`: the parameters of a tool as a schema that grammars can follow."""

import json
from typing import Any

from mlx_tq.grammar.grammar_source import JSON_SEPARATORS, GrammarError, Subschema, subschemas

Schema = dict[str, Any]

_ANNOTATIONS = ("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly")
_IDENTITY = ("$schema", "$id", "$comment", "x-guidance")
_DEFINITIONS = ("$defs", "definitions")
_COMBINATORS = ("allOf", "anyOf", "oneOf", "$ref")
_OPEN = (*_COMBINATORS, "patternProperties")  # objects with these may have other properties than the listed ones
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("properties", "patternProperties", *_DEFINITIONS), (dict,)),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems", "enum", "required"), (list,)),
    **dict.fromkeys(("$ref", "format", "pattern"), (str,)),
    "type": (str, list),
}
_JSON_TYPES: dict[type, str] = {dict: "an object", list: "an array", str: "a string"}
# Formats of strings that grammars follow. Others are annotations, as JSON Schema has them.
_FORMATS = frozenset(("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"))

# Values that match several parts of a oneOf are allowed too: the alternative is no grammar at all.
_GUIDANCE = {**JSON_SEPARATORS, "coerce_one_of": True}


def make_argument_schema(parameters: Schema | None) -> Schema:
    """Return the schema of a call's arguments.

    Set `additionalProperties` to false where it is missing from an object that lists its properties, so that a model
    cannot add properties forever. Definitions are at the root, where references look for them. Annotations are removed.
    """
    schema: Schema = json.loads(json.dumps(parameters or {"properties": {}}))
    definitions: dict[str, Schema] = {}
    parts: list[Schema] = []
    waiting: list[Subschema] = [((), schema)]
    while waiting:
        path, part = waiting.pop()
        _check(part, path)
        parts.append(part)
        waiting += [((*path, *step), inner) for step, inner in subschemas(part)]
        for keyword in _DEFINITIONS:
            if named := part.pop(keyword, None):
                definitions[keyword] = named | definitions.get(keyword, {})
        _simplify(part)
    open_parts = _open_parts(schema, definitions)
    for part in parts:
        if id(part) not in open_parts and "properties" in part and not any(name in part for name in _OPEN):
            part.setdefault("additionalProperties", False)
    if not any(name in schema for name in _COMBINATORS):
        schema.setdefault("type", "object")
    if schema.get("type", "object") != "object":
        raise GrammarError(f"the type of a tool's parameters is {str(schema['type'])[:64]!r}; it must be 'object'")
    return {"x-guidance": _GUIDANCE, **schema, **definitions}


def named_properties(schema: Schema) -> Schema:
    """Return the schemas of all properties that an object lists or requires, by name."""
    listed = schema.get("properties", {})
    return {**listed, **{name: {} for name in schema.get("required", []) if name not in listed}}


def _check(part: Schema, path: tuple[str, ...]) -> None:
    """Remove keywords that are null, which some clients send for absent ones; raise `GrammarError` for other types."""
    for keyword in [keyword for keyword, value in part.items() if value is None and keyword != "const"]:
        del part[keyword]
    for keyword, types in _TYPES.items():
        value = part.get(keyword)
        if value is not None and not isinstance(value, types):
            names = " or ".join(_JSON_TYPES[kind] for kind in types)
            raise GrammarError(f"it is {str(value)[:64]!r}; it must be {names}", (*path, keyword))
        if keyword in ("type", "required") and isinstance(value, list):
            for item in value:
                if not isinstance(item, str):
                    raise GrammarError(f"it contains {str(item)[:64]!r}; it may contain strings", (*path, keyword))


def _open_parts(schema: Schema, definitions: dict[str, Schema]) -> set[int]:
    """Return the ids of subschemas that do not have all properties of their object: others are listed next to them."""
    targets = {f"#/{keyword}/{name}": part for keyword, named in definitions.items() for name, part in named.items()}
    open_parts: set[int] = set()
    waiting = [(part, False) for part in (schema, *targets.values()) if isinstance(part, dict)]
    while waiting:
        part, is_open = waiting.pop()
        if is_open:
            open_parts.add(id(part))
        is_shared = is_open or "properties" in part
        target = targets.get(part.get("$ref", ""))
        if is_shared and isinstance(target, dict) and id(target) not in open_parts:
            waiting.append((target, True))
        for step, inner in subschemas(part):
            waiting.append((inner, step[0] == "allOf" or (is_shared and step[0] in _COMBINATORS)))
    return open_parts


def _simplify(part: Schema) -> None:
    """Remove what does not change which values are valid."""
    for name in (*_ANNOTATIONS, *_IDENTITY):
        part.pop(name, None)
    if part.get("format") not in _FORMATS:
        part.pop("format", None)
    names = part.get("propertyNames")
    if isinstance(names, dict) and {k: v for k, v in names.items() if k not in _ANNOTATIONS} == {"type": "string"}:
        del part["propertyNames"]
