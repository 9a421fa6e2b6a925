"""Does the model call the right function with the right arguments? mlx-lm's own parser of the model reads its calls.

A file has `functions`, described as OpenAI's API does, and `cases`: what a user asks, and the `call` that is expected,
or null where no function fits. An expected argument lists all values that are right; null among them: it may be absent.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from mlx_tq.errors import ConfigError
from mlx_tq.evaluate.paired import Judged, Sample, with_shared
from mlx_tq.evaluate.thoughts import without_thoughts

Call = dict[str, Any]


@dataclass(frozen=True)
class Parser:
    """What begins and ends a call in a model's text, and what reads it."""

    start: str
    end: str
    parse: Callable[[str, Any], Call | list[Call]]

    def calls(self, text: str, functions: list[Call]) -> list[Call] | None:
        """All calls in a text, none where it has none; None where one cannot be read."""
        found: list[Call] = []
        for piece in text.split(self.start)[1:]:
            body = piece.partition(self.end)[0] if self.end else piece
            try:
                parsed = self.parse(body, functions)
                some = parsed if isinstance(parsed, list) else [parsed]
                found += [{"name": call["name"], "arguments": dict(call["arguments"])} for call in some]
            except (ValueError, KeyError, TypeError, IndexError, AttributeError, SyntaxError):  # parsers of many models
                return None
        return found


def choose_parser(tokenizer: Any, name: str | None) -> Parser:
    """The parser of the model, or one of mlx-lm's by name.

    Raises:
        ConfigError: there is none of that name, or the model has none.
    """
    if name is not None:
        try:
            module = import_module(f"mlx_lm.tool_parsers.{name}")  # only the one that is named
        except ImportError as error:
            raise ConfigError(
                f"--tool-parser is {name!r}, which mlx-lm lacks; it has json_tools, pythonic, mistral and others."
            ) from error
        return Parser(module.tool_call_start, module.tool_call_end, module.parse_tool_call)
    if not tokenizer.has_tool_calling:
        raise ConfigError(
            "the model's chat template knows no functions. Take another model, or --tool-parser json_tools: then the "
            "functions are told in the system turn."
        )
    return Parser(tokenizer.tool_call_start, tokenizer.tool_call_end, tokenizer.tool_parser)


def read_cases(path: str | None) -> tuple[list[Call], list[dict[str, Any]]]:
    """The functions and cases of a file, or of the one inside the package.

    Raises:
        ConfigError: it cannot be read or has another shape.
    """
    try:
        source = files("mlx_tq") / "assets" / "tools" / "calls.json" if path is None else Path(path)
        record = json.loads(source.read_text(encoding="utf-8"))
        functions, cases = record["functions"], record["cases"]
        names = {function["function"]["name"] for function in functions}
        expected = [case["call"] for case in cases if case["ask"] and case["call"] is not None]
        strangers = {call["name"] for call in expected} - names
        if not cases or strangers or not all(isinstance(v, list) for c in expected for v in c["arguments"].values()):
            raise ValueError(f"no cases, unknown functions {sorted(strangers)}, or arguments that are no lists")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"the calls {path} cannot be used: {error!r}. A file is "
            '{"functions": [...], "cases": [{"ask": "...", "call": {"name": "...", "arguments": {"x": [1]}}}]}.'
        ) from error
    return functions, cases


def tool_samples(tokenizer: Any, path: str | None, *, shots: int, count: int, parser_name: str | None) -> list[Sample]:
    """Up to `count` cases behind the first `shots`, whose calls are shown; raises ConfigError as what it calls."""
    functions, cases = read_cases(path)
    parser = choose_parser(tokenizer, parser_name)
    shown, asked = cases[:shots], cases[shots : shots + count]
    if not asked:
        raise ConfigError(f"the file has {len(cases)} cases; {shots} are shown, and none is left. Take fewer --shots.")
    told = parser_name is not None
    samples = []
    for place, case in enumerate(asked):
        turns = [*([_system(functions, parser)] if told else []), *_examples(shown, parser)]
        turns.append({"role": "user", "content": case["ask"]})
        text = _render(tokenizer, turns, None if told else functions)
        ids = list(tokenizer.encode(text, add_special_tokens=False))
        expected = "no call" if case["call"] is None else json.dumps(case["call"])
        judge = _judge(parser, functions, case["call"], partial(without_thoughts, tokenizer, text))
        samples.append(Sample(str(place), f"{shots} shown", ids, 0, expected, judge))
    return with_shared(samples)


def is_expected(calls: list[Call] | None, expected: Call | None) -> bool:
    """Whether these are exactly the call that is expected."""
    if calls is None or expected is None:
        return calls == [] and expected is None
    if len(calls) != 1 or calls[0]["name"] != expected["name"]:
        return False
    given, wanted = calls[0]["arguments"], expected["arguments"]
    return not given.keys() - wanted.keys() and all(given.get(name) in values for name, values in wanted.items())


def _judge(
    parser: Parser, functions: list[Call], expected: Call | None, answer_of: Callable[[str], str | None]
) -> Callable[[str], Judged]:
    def judge(text: str) -> Judged:
        answer = answer_of(text)
        calls = None if answer is None else parser.calls(answer, functions)
        read = "unreadable" if calls is None else json.dumps(calls)
        return Judged(read, float(is_expected(calls, expected)))

    return judge


def _system(functions: list[Call], parser: Parser) -> dict[str, str]:
    described = "\n".join(json.dumps(function["function"]) for function in functions)
    shape = f'{parser.start}{{"name": FUNCTION, "arguments": {{...}}}}{parser.end}'
    words = (
        f"You may call these functions:\n{described}\nTo call one, answer only {shape}. If none fits, answer in words."
    )
    return {"role": "system", "content": words}


def _examples(shown: list[dict[str, Any]], parser: Parser) -> list[dict[str, str]]:
    """Cases with their calls as the model would write them, in JSON."""
    turns = []
    for case in shown:
        first = {name: values[0] for name, values in (case["call"] or {"arguments": {}})["arguments"].items()}
        written = "I have no function for that."
        if case["call"] is not None:
            written = f"{parser.start}{json.dumps({'name': case['call']['name'], 'arguments': first})}{parser.end}"
        turns += [{"role": "user", "content": case["ask"]}, {"role": "assistant", "content": written}]
    return turns


def _render(tokenizer: Any, turns: list[dict[str, str]], functions: list[Call] | None) -> str:
    try:
        options = {} if functions is None else {"tools": functions}
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **options))
    except (TemplateError, ValueError) as error:
        raise ConfigError(f"the model's chat template refuses these turns: {error}. Take --shots 0.") from error
