import json
from itertools import product
from types import SimpleNamespace

import jsonschema_rs
import pytest

from mlx_tq.errors import ConfigError
from mlx_tq.evaluate.tools import choose_parser, is_expected, read_cases, tool_samples

PLAIN = SimpleNamespace(has_tool_calling=False)
WEATHER = {"name": "get_weather", "arguments": {"city": ["Oslo"], "unit": ["celsius", None]}}


def test_the_expected_calls_are_calls_of_the_functions():
    functions, cases = read_cases(None)
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in functions}
    assert len(cases) > 30
    assert {case["call"]["name"] for case in cases if case["call"]} == set(schemas)
    for case in cases:
        call = case["call"] or {"arguments": {}}
        for values in product(*call["arguments"].values()):
            given = {k: v for k, v in zip(call["arguments"], values, strict=True) if v is not None}
            if case["call"]:
                jsonschema_rs.validate({**schemas[call["name"]], "additionalProperties": False}, given)


@pytest.mark.parametrize(
    ("calls", "right"),
    [
        ([{"name": "get_weather", "arguments": {"city": "Oslo"}}], True),
        ([{"name": "get_weather", "arguments": {"city": "Oslo", "unit": "celsius"}}], True),
        ([{"name": "get_weather", "arguments": {"city": "Oslo", "unit": "kelvin"}}], False),
        ([{"name": "get_weather", "arguments": {"city": "Oslo", "day": "today"}}], False),
        ([{"name": "get_weather", "arguments": {"unit": "celsius"}}], False),
        ([{"name": "weather", "arguments": {"city": "Oslo"}}], False),
        ([{"name": "get_weather", "arguments": {"city": "Oslo"}}] * 2, False),
        ([], False),
        (None, False),
    ],
)
def test_a_call_is_right_as_a_whole(calls, right):
    assert is_expected(calls, WEATHER) is right
    assert is_expected(calls, None) is (calls == [])


@pytest.mark.parametrize(
    ("parser", "text", "calls"),
    [
        ("json_tools", 'Yes: <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call> Done.', [("f", {"x": 1})]),
        ("json_tools", '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 2, [("f", {})] * 2),
        ("json_tools", '<tool_call>{"name": "f"', None),
        ("json_tools", "<tool_call>[]</tool_call>", []),
        ("json_tools", '<tool_call>{"name": "f"}</tool_call>', None),
        ("json_tools", "in words", []),
        ("pythonic", '<|tool_call_start|>[f(x=1, y="a")]<|tool_call_end|>', [("f", {"x": 1, "y": "a"})]),
    ],
)
def test_mlx_lms_parsers_parse_the_calls(parser, text, calls):
    found = choose_parser(PLAIN, parser).calls(text, [])
    assert found == (None if calls is None else [{"name": name, "arguments": given} for name, given in calls])


def test_a_system_prompt_describes_the_functions_if_a_parser_is_named(embedded):
    _, tokenizer = embedded
    with pytest.raises(ConfigError, match="--tool-parser json_tools"):
        choose_parser(PLAIN, None)
    with pytest.raises(ConfigError, match="which mlx-lm lacks"):
        choose_parser(PLAIN, "no_such")
    samples = tool_samples(tokenizer, None, shots=2, count=4, parser_name="json_tools")
    assert [json.loads(sample.expected)["name"] for sample in samples[1:]] == ["get_weather"] * 3
    assert samples[0].expected == "no call"
    text = tokenizer.decode(samples[0].ids)
    assert text.count('"name": "set_timer", "arguments": {"minutes": 12') == 1
    answer = '<tool_call>{"name": "get_weather", "arguments": {"city": "Nairobi", "unit": "fahrenheit"}}</tool_call>'
    assert [sample.judge(answer)[1] for sample in samples] == [0, 1, 0, 0]
    with pytest.raises(ConfigError, match="none is left"):
        tool_samples(tokenizer, None, shots=99, count=1, parser_name="json_tools")


@pytest.mark.parametrize(
    "record", [{}, {"functions": [], "cases": []}, {"functions": [], "cases": [{"ask": "a", "call": WEATHER}]}]
)
def test_a_file_of_another_shape_is_refused(tmp_path, record):
    path = tmp_path / "calls.json"
    path.write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="cannot be used"):
        read_cases(str(path))
