"""Random schemas, regular expressions and Lark grammars: valid, invalid and expensive ones."""

import json
from pathlib import Path

from mlx_tq.grammar.grammar_source import GrammarSource

ORDINARY = json.loads((Path(__file__).parents[2] / "benchmarks" / "server" / "schemas.json").read_text())
NUMBERS = [
    0, 1, -1, 2, 3, 7, 100, 0.1, -0.5, 1e-9, 1e9, 1e16, -1e16, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) + 513,
    -(2**63) + 1025, -(2**63), 2**64, 1e19, -1e19, 1e300, -1e300, 5e-324, 10**30, -(10**400), 7919, 104729, 1299709,
]  # fmt: skip
SIZES = [0, 1, 2, 3, 5, 17, 100, 1000, 65_536, 10**6, 2**31, 2**63, -1, 1.5]
TYPES = ["string", "integer", "number", "boolean", "null", "array", "object", "strng"]
FORMATS = ["date", "date-time", "time", "email", "uuid", "ipv4", "ipv6", "hostname", "uri", "duration", "none-such"]
ATOMS = [
    "a", "b", "0", ".", r"\d", r"\w", r"\s", "[a-z]", "[^\"\\\\]", r"\p{L}", r"\b", "^", "$", "é", "\U0001f600", " ",
    "\\", "(", "[", "(?=a)", "(?i)", r"\x00", "{", "\"", "/", "\n", "(?P<x>a)", r"\1", "[[:alpha:]]", "a&b", "~(a)",
]  # fmt: skip
QUANTIFIERS = ["", "", "*", "+", "?", "{2}", "{0,3}", "{1,500}", "{1000}", "{3,}", "*?", "{100000}", "{5,2}"]


def random_source(rng):
    """Return a random grammar; raise `GrammarError` if it is refused before compiling."""
    kind = rng.random()
    if kind < 0.55:
        return GrammarSource.of_schema(_root(rng))
    if kind < 0.65:
        return GrammarSource("json_schema", json.dumps(_mutated(rng, rng.choice(ORDINARY)["schema"])))
    if kind < 0.8:
        return GrammarSource("regex", _regex(rng, 4))
    return GrammarSource("lark", _lark(rng))


def _root(rng):
    schema = _schema(rng, rng.randint(1, 4))
    schema["$defs"] = {name: _schema(rng, 2) for name in ("a", "b", "c")}
    return schema


def _schema(rng, depth):
    """Return a schema of a few keywords, with valid and invalid values."""
    schema = {"type": rng.choice(TYPES[:-1] if rng.random() < 0.95 else TYPES)} if rng.random() < 0.8 else {}
    if rng.random() < 0.05:
        schema["type"] = rng.sample(TYPES, 2)
    for _ in range(rng.randint(0, 3)):
        schema |= _keyword(rng, depth)
    return schema


def _keyword(rng, depth):
    def several(most):
        return [_schema(rng, depth - 1) for _ in range(rng.randint(1, most))]

    simple = rng.choice(
        [
            lambda: {rng.choice(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]): _number(rng)},
            lambda: {"multipleOf": _number(rng)},
            lambda: {rng.choice(["minLength", "maxLength", "minItems", "maxItems"]): rng.choice(SIZES)},
            lambda: {rng.choice(["minProperties", "maxProperties"]): rng.choice(SIZES)},
            lambda: {"pattern": _regex(rng, 3)},
            lambda: {"format": rng.choice(FORMATS)},
            lambda: {"const": rng.choice([_number(rng), "a", None, {"a": [1, "é"]}, [], "\x00", '"\\'])},
            lambda: {"enum": rng.sample([_number(rng), "a", None, {"b": 1}, "x" * 1000], rng.randint(0, 5))},
            lambda: {"$ref": rng.choice(["#", "#/$defs/a", "#/$defs/b", "#/$defs/c", "#/$defs/none"])},
        ]
    )
    if depth <= 0 or rng.random() < 0.5:
        return simple()
    return rng.choice(
        [
            lambda: {"properties": {name: _schema(rng, depth - 1) for name in rng.sample('abcdefgh"\\é', 3)}},
            lambda: {"required": rng.sample("abcdefgh", 2)},
            lambda: {"patternProperties": {_regex(rng, 2): _schema(rng, depth - 1)}},
            lambda: {"additionalProperties": rng.choice([True, False, _schema(rng, depth - 1)])},
            lambda: {"items": _schema(rng, depth - 1)},
            lambda: {"prefixItems": several(3)},
            lambda: {rng.choice(["anyOf", "oneOf"]): several(4)},
            lambda: {"allOf": several(rng.choice([2, 2, 3, 6, 18]))},
            lambda: {"not": _schema(rng, depth - 1)},
            lambda: {"x-guidance": {"whitespace_flexible": True}},
        ]
    )()


def _number(rng):
    return rng.choice(NUMBERS) if rng.random() < 0.5 else rng.randint(-1000, 1000)


def _regex(rng, depth):
    parts = []
    for _ in range(rng.randint(1, 4)):
        part = rng.choice(ATOMS)
        if depth and rng.random() < 0.5:
            part = f"({_regex(rng, depth - 1)})"
        parts.append(part + rng.choice(QUANTIFIERS))
    joined = rng.choice(["", "", "|", ".*"]).join(parts)
    return joined * rng.choice([1, 1, 1, 1, 1, 10, 500]) if depth == 3 else joined


def _lark(rng):
    """Return rules and terminals that refer to each other, including cycles."""
    names = ["start", "x", "y", "T", "U"]

    def part():
        schema, regex = json.dumps(_schema(rng, 1)), _regex(rng, 2).replace("/", "").replace("\n", "")
        leaves = ['"a"', '"b"', '""', f"/{regex}/", "/b+/", "<[0]>", "<|im_end|>", f"%json {schema}"]
        inner = rng.choice([*names, *names, *leaves]) + rng.choice(["", "", "", "*", "+", "?", "{2,5}", "~3"])
        return f"({inner} | {rng.choice(names)})" if rng.random() < 0.2 else inner

    lines = []
    for name in names:
        options = [" ".join(part() for _ in range(rng.randint(1, 3))) for _ in range(rng.randint(1, 3))]
        lines.append(f"{name}: {' | '.join(options)}")
    if rng.random() < 0.1:
        lines.append(rng.choice(["%ignore /[ab]+/", "%import common.INT", "%llguidance {}", "z[lazy]: T"]))
    return "\n".join(lines)


def _mutated(rng, schema):
    """Return a schema with some of its values replaced."""
    copied = json.loads(json.dumps(schema))
    places = []
    waiting = [copied]
    while waiting:
        part = waiting.pop()
        keys = part.keys() if isinstance(part, dict) else range(len(part))
        for key in keys:
            places.append((part, key))
            if isinstance(part[key], dict | list):
                waiting.append(part[key])
    for part, key in rng.sample(places, min(len(places), rng.randint(1, 3))):
        part[key] = rng.choice([_number(rng), _schema(rng, 2), rng.choice(TYPES), [], {}, None, True, "("])
    return copied
