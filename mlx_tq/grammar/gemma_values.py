"""`GemmaValues` writes the values of Gemma 4's calls: JSON with bare names, and with marks for quotes."""

import re
from typing import Any

from mlx_tq.grammar.argument_schema import Schema, named_properties
from mlx_tq.grammar.grammar_rules import Rules
from mlx_tq.grammar.grammar_source import GrammarError

_QUOTE = '<|"|>'
_NAME = re.compile(r"\w+", re.ASCII)
_FOLLOWED = {"type", "properties", "required", "additionalProperties", "items", "minItems", "maxItems", "enum", "const"}
_COMBINED = {"anyOf", "oneOf", "allOf", "$ref"}
_IGNORED = {"pattern", "minLength", "maxLength", "format", "$defs", "definitions", "x-guidance"}
_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_TYPES = ("string", "number", "boolean", "null", "array", "object")


class GemmaValues:
    """Writes values by a schema; its root has the definitions."""

    def __init__(self, rules: Rules, root: Schema) -> None:
        self._rules = rules
        self._targets = {
            f"#/{keyword}/{name}": part
            for keyword in ("$defs", "definitions")
            for name, part in root.get(keyword, {}).items()
        }
        self._names: dict[str, str] = {}  # of the rules of definitions; "" is any value

    def object(self, schema: Schema) -> str:
        """Return the expression of an object."""
        _check(schema)
        rules, others = self._rules, schema.get("additionalProperties", {})
        properties, required = named_properties(schema), schema.get("required", [])
        if properties or others is False:
            parts = [(f"{self._key(name)} {self.value(part)}", name in required) for name, part in properties.items()]
            inner = rules.separated(parts, ",")
        else:
            pair = f'/[A-Za-z0-9_]+/ ":" {self.value(others)}'
            inner = f'({pair} ("," {pair})*)?'
        return f"{rules.text('{')} {inner} {rules.text('}')}"

    def value(self, schema: Any) -> str:
        """Return the expression of a value, the name of a rule."""
        if not isinstance(schema, dict) or not schema:
            return self._any()
        _check(schema)
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "enum" in schema or "const" in schema:
            options = schema.get("enum", [schema.get("const")])
            if not options:
                raise GrammarError("an enum without values matches nothing; list at least one", ("enum",))
            return self._rules.add(" | ".join(map(self._literal, options)))
        for keyword in ("anyOf", "oneOf", "allOf"):
            if parts := schema.get(keyword):
                if keyword == "allOf" and len(parts) > 1:
                    raise GrammarError("several schemas in allOf are not supported in this call format", ("allOf",))
                return self._rules.add(" | ".join(map(self.value, parts)))
        types = schema.get("type", _TYPES)
        kinds = [types] if isinstance(types, str) else types
        return self._rules.add(" | ".join(self._of_type(kind, schema) for kind in kinds))

    def _of_type(self, kind: str, schema: Schema) -> str:
        rules = self._rules
        if kind == "string":
            return f"{rules.text(_QUOTE)} {rules.raw(_QUOTE)}"
        if kind == "object":
            return self.object(schema)
        if kind == "array":
            item, least, most = self.value(schema.get("items")), schema.get("minItems", 0), schema.get("maxItems")
            if most == 0:
                return '"[" "]"'
            others = f"{{{max(least, 1) - 1},{'' if most is None else most - 1}}}"
            return f'"[" ({item} ("," {item}){others}){"" if least else "?"} "]"'
        return rules.json({"type": kind, **{name: schema[name] for name in _LIMITS if name in schema}})

    def _key(self, name: str) -> str:
        if not _NAME.fullmatch(name):
            message = "a property's name may have letters, digits and '_' in this call format"
            raise GrammarError(message, ("properties", name))
        return self._rules.text(f"{name}:")

    def _literal(self, value: Any) -> str:
        rules = self._rules
        if isinstance(value, str):
            if _QUOTE in value:
                raise GrammarError(f"an option with {_QUOTE} is not supported in this call format", ("enum",))
            return rules.text(f"{_QUOTE}{value}{_QUOTE}")
        if isinstance(value, dict):
            parts = [(f"{self._key(name)} {self._literal(part)}", True) for name, part in value.items()]
            return f"{rules.text('{')} {rules.separated(parts, ',')} {rules.text('}')}"
        if isinstance(value, list):
            return f'"[" {rules.separated([(self._literal(part), True) for part in value], ",")} "]"'
        return rules.json({"const": value})

    def _reference(self, target: str) -> str:
        if target not in self._names:
            if target not in self._targets:
                raise GrammarError(f"the schema defines no {target[:64]!r}", ("$ref",))
            name = self._names[target] = self._rules.name()
            self._rules.lines.append(f"{name}: {self.value(self._targets[target])}")
        return self._names[target]

    def _any(self) -> str:
        if "" not in self._names:
            name = self._names[""] = self._rules.name()
            parts = " | ".join(self._of_type(kind, {}) for kind in _TYPES)
            self._rules.lines.append(f"{name}: {parts}")
        return self._names[""]


def _check(schema: Schema) -> None:
    """Raise `GrammarError` for a keyword that would be ignored although it changes which values are valid."""
    unknown = {*schema} - _FOLLOWED - _COMBINED - _IGNORED - {*_LIMITS}
    combined = _COMBINED & {*schema}
    unknown |= {"properties", "items", "required", "additionalProperties"} & {*schema} if combined else set()
    if unknown:
        keyword = min(unknown)
        names = f"{keyword} together with {min(combined)}" if combined else keyword
        raise GrammarError(f"{names} is not supported in this call format", (keyword,))
