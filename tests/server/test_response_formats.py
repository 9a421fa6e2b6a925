"""Answers that follow a schema or a grammar, combined with other options."""

import json
import re
from pathlib import Path

import jsonschema_rs
import openai
import pytest
from smollm2 import needs_smollm2

from .conftest import ENDLESS, QUESTION
from .harness import running, text_of_stream, together

CASES = json.loads((Path(__file__).parents[2] / "benchmarks" / "server" / "schemas.json").read_text())


def schema_of(**properties):
    """Return the schema of an object that has all these properties and no others."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


PERSON = schema_of(
    name={"type": "string", "maxLength": 12},
    age={"type": "integer", "minimum": 0, "maximum": 120},
    tags={"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
)
CODE = schema_of(code={"type": "string", "pattern": "^[0-9]{6}$"})


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def regex_format(pattern):
    return {"type": "grammar", "syntax": "regex", "definition": pattern}


@pytest.mark.full
def test_random_answers_are_valid_and_end(server):
    """Each answer of a batch has its own mask, or none."""
    booleans = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}
    schemas = [PERSON, {"enum": ["red", "green"]}, PERSON, booleans]

    def ask(seed):
        options = {"temperature": 3, "seed": seed, "max_tokens": 120}
        return server.chat("Who?", response_format=schema_format(schemas[seed]), **options).choices[0]

    def free():
        return server.chat(QUESTION).choices[0].message.content

    *choices, text = together([*(lambda seed=seed: ask(seed) for seed in range(4)), free])
    assert text == "417295"
    for schema, choice in zip(schemas, choices, strict=True):
        assert choice.finish_reason == "stop"
        jsonschema_rs.validate(schema, json.loads(choice.message.content))
    assert ask(0).message.content == choices[0].message.content != choices[2].message.content
    options = {"temperature": 3, "seed": 0, "max_tokens": 120, "response_format": schema_format(PERSON)}
    assert text_of_stream(server.chat("Who?", stream=True, **options)) == choices[0].message.content


def test_answers_have_the_form_of_the_schema(server):
    options = {"max_tokens": 60, "logit_bias": ENDLESS, "extra_body": {"repetition_penalty": 1.1}}
    for response_format in (schema_format(CODE), {"type": "json_object", "schema": CODE}):
        choice = server.chat(QUESTION, response_format=response_format, **options).choices[0]
        assert re.fullmatch("[0-9]{6}", json.loads(choice.message.content)["code"])
        assert choice.finish_reason == "stop", "a bias does not keep a grammar from its end"
    choice = server.chat(
        QUESTION, response_format=regex_format("[0-9]{3} [0-9]{3}!"), logprobs=True, top_logprobs=3
    ).choices[0]
    assert re.fullmatch("[0-9]{3} [0-9]{3}!", choice.message.content)
    *_, mark, end = choice.logprobs.content
    assert [len(mark.top_logprobs), len(end.top_logprobs)] == [1, 2], "only the mark, then only what ends an answer"


def test_an_object_without_schema_and_answers_that_are_cut(server):
    cut = server.chat(QUESTION, response_format={"type": "json_object"}, max_tokens=5, temperature=3, seed=1).choices[0]
    assert cut.finish_reason == "length"
    assert cut.message.content.startswith("{")
    stopped = server.chat(QUESTION, response_format=schema_format(CODE), stop="}").choices[0]
    assert (stopped.finish_reason, stopped.message.content[:1]) == ("stop", "{")
    assert "}" not in stopped.message.content


@pytest.mark.full
def test_a_grammar_that_grows_too_large_fails_its_own_answer_only(server):
    wild = regex_format("(.*a.{1,500}b){1,100}c")

    def hostile():
        options = {"temperature": 3, "seed": 1, "max_tokens": 400, "response_format": wild}
        try:
            return server.chat("Who?", **options).choices[0].finish_reason
        except openai.BadRequestError as error:
            return error.body["param"]

    text, outcome = together([lambda: server.chat(QUESTION).choices[0].message.content, hostile])
    assert (text, outcome) == ("417295", "response_format")
    assert server.chat(QUESTION).choices[0].message.content == "417295"


@pytest.mark.parametrize(
    ("schema", "path", "word"),
    [
        ({"type": "object", "properties": {"a": {"items": {"type": "strng"}}}}, ".properties.a.items", "strng"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"not": {}}}}, ".$defs.x", "not"),
        ({"properties": {"a": {"type": "string", "pattern": "("}}}, ".properties.a", "unclosed group"),
        ({"type": "string", "enum": [], "title": "x"}, "", "Unsatisfiable"),
        ({"$ref": "https://example.com/x"}, "", "does not fetch"),
        ({"title": "x" * 2**16}, "", "65,536"),
    ],
)
def test_a_schema_that_cannot_be_followed(server, schema, path, word):
    response = server.post(messages=[{"role": "user", "content": "hi"}], response_format=schema_format(schema))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, f"response_format.json_schema.schema{path}")
    assert word in error["message"]


def test_references_that_would_overflow_the_stack(server):

    def nested(inner, levels):
        for _ in range(levels):
            inner = {"items": inner}
        return inner

    chain = {f"a{n}": nested({"$ref": f"#/$defs/a{n + 1}"}, 100) for n in range(40)}
    schema = {"$ref": "#/$defs/a0", "$defs": {**chain, "a40": {"const": 1}}}
    assert server.chat("hi", response_format=schema_format(schema), max_tokens=4).usage.completion_tokens == 4
    deep = nested({"const": 1}, 200)
    response = server.post(messages=[{"role": "user", "content": "hi"}], response_format=schema_format(deep))
    assert (response.status_code, "recursion" in response.text) == (400, True)


def check(server, seeds, cases=CASES):
    """Check that most answers end by themselves, and that all of these are valid."""

    def ask(case, seed):
        prompt = f"Describe {case['asked']} as JSON."
        options = {"temperature": 1, "seed": seed, "max_tokens": 400, "response_format": schema_format(case["schema"])}
        return lambda: server.chat(prompt, **options).choices[0]

    ended = 0
    for seed in seeds:
        for case, choice in zip(cases, together([ask(case, seed) for case in cases]), strict=True):
            if choice.finish_reason == "stop":
                ended += 1
                jsonschema_rs.validate(case["schema"], json.loads(choice.message.content))
    assert ended >= 0.95 * len(cases) * len(seeds)


@pytest.mark.parametrize("cases", [CASES[::4], pytest.param(CASES, marks=pytest.mark.full)], ids=["a quarter", "all"])
def test_answers_over_twenty_schemas_end_and_are_valid(server, cases):
    check(server, range(1), cases)


@needs_smollm2
@pytest.mark.full
def test_two_hundred_of_a_real_model(tmp_path):
    with running("smollm2", tmp_path / "log", "--dtype", "float32") as server:
        check(server, range(10))
