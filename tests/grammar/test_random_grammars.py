"""Random schemas, regular expressions and Lark grammars get a result in time, and the process that compiles survives.

They are valid, invalid and expensive ones.
"""

import asyncio
import json
import random
import time
from collections import Counter
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_tq.grammar.constraint import Grammars
from mlx_tq.grammar.grammar_source import GrammarError, GrammarSource
from mlx_tq.grammar.sandbox import CompileLimits
from mlx_tq.models import load

AT_ONCE = 4
MASKS = 24
LATE_S = 10  # on a busy machine, beyond the limit
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
        schema = _schema(rng, rng.randint(1, 4))
        schema["$defs"] = {name: _schema(rng, 2) for name in ("a", "b", "c")}
        return GrammarSource.of_schema(schema)
    if kind < 0.65:
        return GrammarSource("json_schema", json.dumps(_mutated(rng, rng.choice(ORDINARY)["schema"])))
    if kind < 0.8:
        return GrammarSource("regex", _regex(rng, 4))
    return GrammarSource("lark", _lark(rng))


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


def follow(constraint, eos_ids, rng, width=4140):
    """Generate a random answer; return how it ended."""
    tokens, logits = [5], mx.random.normal((1, width), key=mx.random.key(rng.randrange(2**32)))
    for _ in range(MASKS):
        likely = constraint(mx.array(tokens), logits)
        if constraint.error is not None:
            return "too complex"
        tokens.append(mx.argmax(likely).item())
        if tokens[-1] in eos_ids:
            break
    return "followed"


async def outcome(grammars, eos_ids, seed):
    """Return the outcome of a seed's grammar, and its seconds."""
    rng, started = random.Random(seed), time.monotonic()
    try:
        grammar = await grammars.compile(random_source(rng))
    except GrammarError as error:
        result = "limit" if type(error) is not GrammarError else "invalid"
    else:
        result = follow(grammars.constraint(grammar), eos_ids, rng)
    return result, time.monotonic() - started


@pytest.mark.full
@pytest.mark.parametrize("count", [60, pytest.param(20_000, marks=pytest.mark.full)])
def test_every_grammar_gets_a_result_in_time(count):
    tokenizer = load()[1]
    grammars, outcomes, seconds = Grammars(tokenizer), Counter(), []

    async def work(seeds):
        for seed in seeds:
            result, duration = await outcome(grammars, tokenizer.eos_token_ids, seed)
            outcomes[result] += 1
            seconds.append(duration)

    async def main():
        await asyncio.gather(*(work(range(start, count, AT_ONCE)) for start in range(AT_ONCE)))

    try:
        asyncio.run(main())
    finally:
        grammars.close()
    print(outcomes, f"longest {max(seconds):.1f} s")
    assert outcomes.total() == count
    assert outcomes["followed"] > count / 10
    assert outcomes["invalid"] > count / 10
    # A valid grammar is compiled twice, each time by one process or thread of AT_ONCE.
    assert max(seconds) < (1 + AT_ONCE) * CompileLimits().seconds + LATE_S
