"""`mlx_tq.generate --json-schema` holds the answer to a schema, or says why it cannot."""

import json
import re

import pytest

from .tools import PACKED, refused

ASK = ("generate", "-p", "The access code is 417295. What is the access code?", "--verbose", "F")
CODE = {"type": "object", "properties": {"code": {"type": "string", "pattern": "^[0-9]{6}$"}}, "required": ["code"]}


@pytest.fixture
def holding(tmp_path):
    def write(schema):
        path = tmp_path / "schema.json"
        path.write_text(schema if isinstance(schema, str) else json.dumps(schema))
        return "--json-schema", path

    return write


def test_an_answer_is_what_the_schema_describes(cli, holding):
    result = cli(*ASK, "-m", 60, *PACKED, *holding({**CODE, "additionalProperties": False}))
    assert result.code == 0
    assert re.fullmatch("[0-9]{6}", json.loads(result.out)["code"])


def test_schemas_that_cannot_be_used(cli, holding, tmp_path):
    refused(cli(*ASK, *holding("{")), "schema.json cannot be read")
    refused(cli(*ASK, "--json-schema", tmp_path / "none.json"), "none.json cannot be read")
    refused(cli(*ASK, *holding("[1]")), "holds [1]; it must be a JSON object")
    refused(cli(*ASK, *holding({"properties": {"a": {"type": "strng"}}})), "properties.a: Invalid type: strng")


@pytest.mark.full
def test_a_grammar_that_grows_too_large_says_so(cli, holding):
    wild = {"type": "string", "pattern": "^(.*a.{1,500}b){1,100}c$"}
    result = cli(*ASK, "-m", 400, "--temp", 3, "--seed", 1, *holding(wild))
    assert result.code == 2
    assert "the answer cannot follow its grammar any further" in result.err
