"""Calls in the forms of mlx-lm's parsers: the grammar accepts them, the parser reads them, and nothing else passes."""

import json
from importlib import import_module

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from mlx_tq.grammar.argument_schema import make_argument_schema
from mlx_tq.grammar.call_grammar import CallForm, Tool, find_special_tokens, write_grammar
from mlx_tq.grammar.grammar_source import GrammarError, GrammarSource
from mlx_tq.models import load

WEATHER = {
    "type": "object",
    "description": "Where and when",
    "properties": {
        "city": {"type": "string", "description": "A city"},
        "unit": {"enum": ["c", "f"]},
        "days": {"type": "integer", "format": "int32"},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}},
    },
    "required": ["city", "days"],
    "$defs": {"tag": {"type": "string"}},
}
TOOLS = [Tool("weather", WEATHER), Tool("now", None)]
ARGUMENTS = {"city": "Paris <b>", "unit": "c", "days": 3, "tags": ["a"]}
JSON = json.dumps(ARGUMENTS)
CALL = f'{{"name": "weather", "arguments": {JSON}}}'
CONTROL = [
    "[TOOL_CALLS]", "[ARGS]", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_end|>", "<|tool_call_argument_begin|>", "<|tool_call_start|>", "<|open|>", "<|close|>", "<|sep|>",
    "<|tool_call>", "<tool_call|>", '<|"|>',
]  # fmt: skip
KIMI = [f"<|tool_call_begin|>functions.{name}<|tool_call_argument_begin|>" for name in ("weather:0", "now:1")]


def tags(start, key, after, end):
    return start + "".join(
        f"{key}{name}{after}{value if isinstance(value, str) else json.dumps(value)}{end}"
        for name, value in ARGUMENTS.items()
    )


# A call of `weather` and a call of `now`, by parser.
ANSWERS = {
    "json_tools": f'<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{{"name": "now", "arguments": {{}}}}</tool_call>',
    "mistral": f"[TOOL_CALLS]weather[ARGS]{JSON}[TOOL_CALLS]now[ARGS]{{}}",
    "kimi_k2": f"<|tool_calls_section_begin|>{KIMI[0]}{JSON}<|tool_call_end|>{KIMI[1]}{{}}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "pythonic": '<|tool_call_start|>[weather(city="Paris <b>", unit="c", days=3, tags=["a"]), now()]<|tool_call_end|>',
    "glm47": tags("<tool_call>weather", "<arg_key>", "</arg_key><arg_value>", "</arg_value>")
    + "</tool_call>\n<tool_call>now</tool_call>",
    "qwen3_coder": tags("<tool_call>\n<function=weather>\n", "<parameter=", ">\n", "\n</parameter>\n")
    + "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "minimax_m2": tags('<minimax:tool_call>\n<invoke name="weather">\n', '<parameter name="', '">', "</parameter>\n")
    + '</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>Paris <b><|close|>argument<|sep|>'
    '<|open|>argument key="unit" type="string"<|sep|>c<|close|>argument<|sep|>'
    '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
    '<|open|>argument key="tags" type="array"<|sep|>["a"]<|close|>argument<|sep|><|close|>call<|sep|>'
    '<|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
    "gemma4": '<|tool_call>call:weather{city:<|"|>Paris <b><|"|>,unit:<|"|>c<|"|>,days:3,tags:[<|"|>a<|"|>]}'
    "<tool_call|><|tool_call>call:now{}<tool_call|>",
    "longcat": tags(
        *("<longcat_tool_call>weather\n", "<longcat_arg_key>", "</longcat_arg_key>\n<longcat_arg_value>"),
        "</longcat_arg_value>\n",
    )
    + '</longcat_tool_call>\n<longcat_tool_call>{"name": "now", "arguments": {}}</longcat_tool_call>',
    "muse_spark": tags(
        *('<atem:function_calls>\n<atem:invoke name="weather">\n', '<atem:parameter name="', '">'),
        "</atem:parameter>\n",
    )
    + '</atem:invoke>\n<atem:invoke name="now">\n</atem:invoke>\n</atem:function_calls>',
    "minicpm5": tags('<function name="weather">', '<param name="', '">', "</param>")
    + '</function>\n<function name="now"></function>',
}


@pytest.fixture(scope="module")
def tokenizer():
    inner = load()[1]._tokenizer
    inner.add_special_tokens({"additional_special_tokens": CONTROL})
    return inner


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    return LLTokenizer(str(tokenizer.backend_tokenizer.to_str()), eos_token=[2])


def form_of(parser):
    module = import_module(f"mlx_lm.tool_parsers.{parser}")
    return CallForm(parser, module.tool_call_start, module.tool_call_end, module.parse_tool_call)


@pytest.fixture
def accepts(tokenizer, vocabulary):
    """Return a function that says whether a grammar accepts all of a text."""

    def accepts(source, text):
        matcher = LLMatcher(vocabulary, source.to_llguidance(), log_level=0)
        assert not matcher.get_error(), matcher.get_error()
        ids = tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return accepts


@pytest.mark.parametrize("parser", ANSWERS)
def test_the_forms_of_calls(tokenizer, accepts, parser):
    form, special, answer = form_of(parser), find_special_tokens(tokenizer), ANSWERS[parser]
    tools = [{"type": "function", "function": vars(tool)} for tool in TOOLS]
    bodies = [part.partition(form.end)[0] if form.end else part for part in answer.split(form.start)[1:]]
    calls = []
    for body in bodies:
        parsed = form.parse(body, tools)
        calls += parsed if isinstance(parsed, list) else [parsed]
    assert [(call["name"], call["arguments"]) for call in calls] == [("weather", ARGUMENTS), ("now", {})]

    def write(tools=TOOLS, **options):
        return write_grammar(form, tools, special, **options)

    assert accepts(write(), answer)
    assert not accepts(write(one_call=True), answer)
    assert not accepts(write(TOOLS[:1]), answer), "a tool that may not be called"
    assert not accepts(write(), answer.replace("3", '"three"'))
    assert not accepts(write(), answer.replace("city", "town"))
    assert not accepts(write(), f"Let me see. {answer}")
    assert accepts(write(is_opened=True), bodies[0] + form.end)
    either = write(response_format=GrammarSource("regex", "[a-z/]+"))
    assert accepts(either, answer)
    assert accepts(either, "a/b")
    assert not accepts(either, "A")


def test_optional_arguments_may_be_left_out(tokenizer, accepts):
    source = write_grammar(form_of("pythonic"), TOOLS, find_special_tokens(tokenizer))
    assert accepts(source, '<|tool_call_start|>[weather(city="a", days=3)]<|tool_call_end|>')
    assert not accepts(source, "<|tool_call_start|>[weather(days=3)]<|tool_call_end|>")
    only = [Tool("f", {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}})]
    source = write_grammar(form_of("pythonic"), only, find_special_tokens(tokenizer))
    for arguments in ("", "a=1", "b=1", "a=1, b=2"):
        assert accepts(source, f"<|tool_call_start|>[f({arguments})]<|tool_call_end|>")
    assert not accepts(source, "<|tool_call_start|>[f(b=1, a=1)]<|tool_call_end|>")


def test_text_between_tags_does_not_end_the_call(tokenizer, accepts):
    source = write_grammar(form_of("qwen3_coder"), TOOLS, find_special_tokens(tokenizer))
    answer = ANSWERS["qwen3_coder"]
    assert accepts(source, answer.replace("Paris", "two\nlines, <parameter=x>, {"))
    assert not accepts(source, answer.replace("Paris", "</tool_call>"))


def schema_of(value):
    """Return a schema of exactly the shape of a value."""
    if isinstance(value, dict):
        properties = {name: schema_of(part) for name, part in value.items()}
        return {"type": "object", "properties": properties, "required": [*value]}
    if isinstance(value, list):
        return {"type": "array", "items": {"anyOf": [schema_of(part) for part in value]} if value else {}}
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
    return {"type": kinds[type(value)]}


def gemma(value):
    """Return a value in the form of Gemma 4."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{gemma(part)}" for name, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


SCALARS = (
    st.none() | st.booleans() | st.integers(-999, 999) | st.sampled_from(["", "a b", "{c:1}", 'x,"y"', "[é]\n", "<"])
)
NAMES = st.sampled_from(["a", "b_c", "D4"])
VALUES = st.recursive(SCALARS, lambda part: st.lists(part, max_size=3) | st.dictionaries(NAMES, part), max_leaves=8)


@given(arguments=st.dictionaries(NAMES, VALUES), is_known=st.booleans())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nested_values_of_gemma(tokenizer, accepts, arguments, is_known):
    form, text = form_of("gemma4"), f"call:f{gemma(arguments)}"
    assert form.parse(text) == {"name": "f", "arguments": arguments}
    parameters = schema_of(arguments) if is_known else {"type": "object"}
    source = write_grammar(form, [Tool("f", parameters)], find_special_tokens(tokenizer))
    assert accepts(source, f"<|tool_call>{text}<tool_call|>")
    assert not accepts(source, f"<|tool_call>{text[:-1]}<tool_call|>")
    if is_known:
        assert not accepts(source, f"<|tool_call>call:f{gemma({**arguments, 'other': 1})}<tool_call|>")


def test_recursive_definitions_in_gemma_calls(tokenizer, accepts):
    node = {"type": "object", "properties": {"name": {"enum": ["x", 1]}, "next": {"$ref": "#/$defs/node"}}}
    parameters = {"properties": {"first": {"$ref": "#/$defs/node"}}, "$defs": {"node": node}}
    source = write_grammar(form_of("gemma4"), [Tool("f", parameters)], find_special_tokens(tokenizer))
    assert accepts(source, '<|tool_call>call:f{first:{name:<|"|>x<|"|>,next:{next:{name:1}}}}<tool_call|>')
    assert not accepts(source, "<|tool_call>call:f{first:{name:2}}<tool_call|>")


def test_flat_calls_of_function_gemma(accepts):
    form = form_of("function_gemma")
    properties = {
        "city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["c", "f"]},
        "now": {"type": "boolean"},
    }  # fmt: skip
    source = write_grammar(form, [Tool("f", {"properties": properties, "required": ["city"]})], {})
    text = "call:f{city:<escape>Paris, a: b<escape>,days:3,unit:<escape>c<escape>,now:true}"
    arguments = {"city": "Paris, a: b", "days": 3, "unit": "c", "now": True}
    assert form.parse(text) == {"name": "f", "arguments": arguments}
    assert accepts(source, f"<start_function_call>{text}<end_function_call>")
    assert accepts(source, "<start_function_call>call:f{city:<escape><escape>}<end_function_call>")
    for wrong in (text.replace("Paris", "}"), text.replace("3", '"3"'), text.replace(":f{", ":g{"), "call:f{days:3}"):
        assert not accepts(source, f"<start_function_call>{wrong}<end_function_call>")


@pytest.mark.parametrize("city", ["7", "-1.5e3", "true", " null", '"a"', "[1]", '{"a": 1}', "NaN"])
def test_strings_that_read_as_json_are_written_as_json_where_the_parser_reads_it(accepts, city):
    """Else the model's text "7" would become a number."""
    form = form_of("muse_spark")
    source = write_grammar(form, [Tool("f", {"properties": {"city": {"type": "string"}}})], {})
    before, after = '<atem:invoke name="f">\n<atem:parameter name="city">', "</atem:parameter>\n</atem:invoke>\n"
    quoted = f"{before}{json.dumps(city)}{after}"
    assert form.parse(quoted)["arguments"] == {"city": city}
    assert accepts(source, f"{form.start}\n{quoted}{form.end}")
    assert accepts(source, f"{form.start}\n{before}x{city}{after}{form.end}")
    assert not accepts(source, f"{form.start}\n{before}{city}{after}{form.end}") or city == '"a"'


MUSE = [
    ({"type": "string", "enum": ["x", "1"]}, ["x", '"x"', '"1"'], ["1", '"zzz"', "zzz"]),
    ({"type": ["string", "null"]}, ["null", '"null"', "text"], ["5", "true"]),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, ["5", '"5"', "five"], ["5.5", "null"]),
    ({}, ["5", '{"a": 1}', "text", "[]"], []),
]


@pytest.mark.parametrize(("schema", "valid", "wrong"), MUSE)
def test_values_of_any_schema_between_the_tags_of_muse(accepts, schema, valid, wrong):
    form = form_of("muse_spark")
    source = write_grammar(form, [Tool("f", {"properties": {"a": schema}, "required": ["a"]})], {})
    before, after = '<atem:invoke name="f">\n<atem:parameter name="a">', "</atem:parameter>\n</atem:invoke>\n"
    for value in valid:
        assert accepts(source, f"{form.start}\n{before}{value}{after}{form.end}"), value
    for value in wrong:
        assert not accepts(source, f"{form.start}\n{before}{value}{after}{form.end}"), value


def test_arguments_that_longcat_would_read_as_json_are_written_as_json(accepts):
    form = form_of("longcat")
    for schema, value in (({"enum": ["1", "2"]}, "1"), ({"type": ["string", "null"]}, "123"), ({}, "true")):
        source = write_grammar(form, [Tool("f", {"properties": {"a": schema}, "required": ["a"]})], {})
        call = {"name": "f", "arguments": {"a": value}}
        assert form.parse(json.dumps(call)) == call
        assert accepts(source, f"{form.start}{json.dumps(call)}{form.end}")
        tagged = f"f\n<longcat_arg_key>a</longcat_arg_key>\n<longcat_arg_value>{value}</longcat_arg_value>\n"
        assert not accepts(source, f"{form.start}{tagged}{form.end}")


def test_lengths_of_arrays_in_the_form_of_gemma(tokenizer, accepts):
    parameters = {"properties": {"a": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3}}}
    source = write_grammar(form_of("gemma4"), [Tool("f", parameters)], find_special_tokens(tokenizer))
    counts = [n for n in range(6) if accepts(source, f"<|tool_call>call:f{{a:[{','.join('1' * n)}]}}<tool_call|>")]
    assert counts == [2, 3]


def test_mistral_without_control_tokens_for_arguments(accepts):
    form = form_of("mistral")
    source = write_grammar(form, TOOLS, {"[TOOL_CALLS]": 4096})
    answer = f"[{CALL}, {CALL}]"
    assert form.parse(answer)[1]["name"] == "weather"
    assert accepts(source, f"[TOOL_CALLS]{answer}")


@pytest.mark.parametrize(
    ("parser", "tool", "words"),
    [
        ("gemma4", Tool("a.b", None), "must be an identifier"),
        ("gemma4", Tool("f", {"properties": {"a": {"properties": {"b-c": {}}}}}), "may have letters"),
        ("gemma4", Tool("f", {"$ref": "#/$defs/A", "$defs": {"A": {}}}), r"parameters with \$ref"),
        ("gemma4", Tool("f", {"properties": {"a": {"type": "array", "uniqueItems": True}}}), "uniqueItems is not"),
        (
            "gemma4",
            Tool("f", {"properties": {"a": {"allOf": [{}], "properties": {}}}}),
            "properties together with allOf",
        ),
        ("gemma4", Tool("f", {"properties": {"a": {"enum": ['x<|"|>']}}}), "an option with"),
        ("function_gemma", Tool("f", {"properties": {"a": {"type": "array"}}}), "type 'array' are not supported"),
        ("function_gemma", Tool("f", {"properties": {"a": {"enum": ["a}b"]}}}), "an option with"),
        ("json_tools", Tool("a\nb", None), "name may have letters"),
        ("json_tools", Tool("f", {"type": "array"}), "must be 'object'"),
        ("pythonic", Tool("a-b", None), "must be an identifier"),
        ("qwen3_coder", Tool("f", {"anyOf": [{"type": "object"}]}), "anyOf"),
        ("qwen3_coder", Tool("f", {"properties": {"a": {"enum": {1}}}}), "the schema cannot be read: .* set"),
    ],
)
def test_calls_without_a_grammar(parser, tool, words):
    with pytest.raises(GrammarError, match=words):
        write_grammar(form_of(parser), [tool], {})


STRING = {"type": "string"}
NESTED = {"properties": {"a": {"$ref": "#/$defs/x", "$defs": {"x": {"type": "string", "title": "X"}}}}}


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        (None, {"type": "object", "properties": {}, "additionalProperties": False}),
        ({"type": "object"}, {"type": "object"}),
        (
            {"$schema": "x", "properties": {"title": {"title": "t", "format": "path"}}, "propertyNames": STRING},
            {"type": "object", "properties": {"title": {}}, "additionalProperties": False},
        ),
        (
            NESTED,
            {
                "type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "additionalProperties": False,
                "$defs": {"x": {"type": "string"}},
            },
        ),
        (
            {"properties": {"a": {}}, "anyOf": [{"properties": {"b": {"properties": {}}}}]},
            {
                "properties": {"a": {}},
                "anyOf": [{"properties": {"b": {"properties": {}, "additionalProperties": False}}}],
            },
        ),
        ({"propertyNames": {"pattern": "a"}}, {"type": "object", "propertyNames": {"pattern": "a"}}),
        (
            {"type": None, "required": None, "anyOf": None, "properties": {"a": {"const": None, "format": None}}},
            {"type": "object", "properties": {"a": {"const": None}}, "additionalProperties": False},
        ),
    ],
    ids=["none", "any", "annotations", "definitions", "parts", "names", "nulls"],
)  # fmt: skip
def test_schemas_of_arguments(parameters, expected):
    schema = make_argument_schema(parameters)
    del schema["x-guidance"]
    assert schema == expected


def test_alternatives_that_may_match_the_same_values(accepts):
    parameter = {"oneOf": [{"type": "string", "enum": ["all"]}, {"type": "string", "pattern": "^[a-z]+$"}]}
    source = write_grammar(form_of("json_tools"), [Tool("f", {"properties": {"a": parameter}})], {})
    for value, is_valid in (("all", True), ("some", True), ("3", False)):
        call = f'<tool_call>{{"name": "f", "arguments": {{"a": "{value}"}}}}</tool_call>'
        assert accepts(source, call) is is_valid


@pytest.mark.parametrize("parser", ["json_tools", "pythonic", "qwen3_coder"])
@pytest.mark.parametrize(
    ("keyword", "value"),
    [("format", []), ("type", 1), ("type", [{}]), ("properties", []), ("required", [[]]), ("anyOf", {}), ("$ref", [])],
)
def test_keywords_of_a_wrong_type(parser, keyword, value):
    with pytest.raises(GrammarError, match=r"must be|may contain") as refused:
        write_grammar(form_of(parser), [Tool("f", {"properties": {"a": {keyword: value}}})], {})
    assert refused.value.path == ("properties", "a", keyword)


@pytest.mark.parametrize("keyword", ["required", "properties", "type", "anyOf"])
def test_null_keywords_are_absent(keyword):
    for parser in ("json_tools", "pythonic", "qwen3_coder"):
        write_grammar(form_of(parser), [Tool("f", {"properties": {"a": {keyword: None}}, keyword: None})], {})


A = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"properties": {"b": {"type": "integer"}}, "required": ["b"]}
REFERENCE, DEFINITIONS = {"$ref": "#/$defs/A"}, {"$defs": {"A": A}}


@pytest.mark.parametrize(
    "parameters",
    [
        {"allOf": [REFERENCE, B], **DEFINITIONS},
        {**REFERENCE, **B, **DEFINITIONS},
        {"allOf": [{"anyOf": [REFERENCE, {"type": "object"}]}, B], **DEFINITIONS},
        {"allOf": [{"$ref": "#/$defs/C"}, B], "$defs": {"A": A, "C": REFERENCE}},
    ],
    ids=["parts", "siblings", "nested", "chain"],
)
def test_definitions_next_to_other_properties(accepts, parameters):
    source = write_grammar(form_of("json_tools"), [Tool("f", parameters)], {})
    assert accepts(source, '<tool_call>{"name": "f", "arguments": {"a": 1, "b": 2}}</tool_call>')


def test_definitions_of_whole_objects_are_closed():
    schema = make_argument_schema({"properties": {"x": REFERENCE}, **DEFINITIONS})
    assert schema["$defs"]["A"]["additionalProperties"] is False
