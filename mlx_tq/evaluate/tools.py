"""Test whether the model calls the right function with the right arguments; mlx-lm's own parser reads the calls.

A file has `functions`, in the format of OpenAI's API, and `cases`: the words of a user, and the `call` that is
expected, or null where no function fits. An expected argument lists all right values; with null it may be absent.
"""

import json
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from mlx_tq.errors import ConfigError
from mlx_tq.evaluate.asking import Sample, share_prefixes
from mlx_tq.evaluate.reasoning import without_thoughts
from mlx_tq.session.text import TEMPLATE_ERRORS

Call = dict[str, Any]


class ToolParser(NamedTuple):
    """The marks of a call in a model's text, and the function that parses what is between them."""

    start: str
    end: str
    parse: Callable[[str, Any], Call | list[Call]]

    def calls(self, text: str, functions: list[Call]) -> list[Call] | None:
        """Return all calls in a text, or None if one cannot be parsed."""
        calls: list[Call] = []
        for piece in text.split(self.start)[1:]:
            body = piece.partition(self.end)[0] if self.end else piece
            try:
                parsed = self.parse(body, functions)
                for call in parsed if isinstance(parsed, list) else [parsed]:
                    calls.append({"name": call["name"], "arguments": dict(call["arguments"])})
            except (ValueError, KeyError, TypeError, IndexError, AttributeError, SyntaxError):  # parsers of many models
                return None
        return calls


def choose_parser(tokenizer: Any, name: str | None) -> ToolParser:
    if name is not None:
        try:
            module = import_module(f"mlx_lm.tool_parsers.{name}")  # loads only that one
        except ImportError as error:
            raise ConfigError(
                f"--tool-parser is {name!r}, which mlx-lm lacks; it has json_tools, pythonic, mistral and others."
            ) from error
        return ToolParser(module.tool_call_start, module.tool_call_end, module.parse_tool_call)
    if not tokenizer.has_tool_calling:
        raise ConfigError(
            "the model's chat template does not support functions. Use another model, or --tool-parser json_tools, "
            "which describes the functions in the system prompt."
        )
    return ToolParser(tokenizer.tool_call_start, tokenizer.tool_call_end, tokenizer.tool_parser)


def read_cases(path: str | None) -> tuple[list[Call], list[dict[str, Any]]]:
    """Return the functions and cases of a file, or of the one inside the package."""
    try:
        source = files("mlx_tq") / "assets" / "tools" / "calls.json" if path is None else Path(path)
        record = json.loads(source.read_text(encoding="utf-8"))
        functions, cases = record["functions"], record["cases"]
        names = {function["function"]["name"] for function in functions}
        expected = [case["call"] for case in cases if case["ask"] and case["call"] is not None]
        unknown = {call["name"] for call in expected} - names
        if not cases or unknown or not all(isinstance(v, list) for c in expected for v in c["arguments"].values()):
            raise ValueError(f"no cases, unknown functions {sorted(unknown)}, or arguments that are not lists")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"the calls {path} cannot be used: {error!r}. A file is "
            '{"functions": [...], "cases": [{"ask": "...", "call": {"name": "...", "arguments": {"x": [1]}}}]}.'
        ) from error
    return functions, cases


def tool_samples(tokenizer: Any, path: str | None, *, shots: int, count: int, parser_name: str | None) -> list[Sample]:
    """Return up to `count` cases after the first `shots`, whose calls are shown as examples."""
    functions, cases = read_cases(path)
    parser = choose_parser(tokenizer, parser_name)
    examples, questions = cases[:shots], cases[shots : shots + count]
    if not questions:
        raise ConfigError(f"the file has {len(cases)} cases; {shots} are shown, and none is left. Use fewer --shots.")
    turns_before = []
    if parser_name is not None:
        described = "\n".join(json.dumps(function["function"]) for function in functions)
        shape = f'{parser.start}{{"name": FUNCTION, "arguments": {{...}}}}{parser.end}'
        words = f"You may call these functions:\n{described}\nTo call one, answer only {shape}."
        turns_before.append({"role": "system", "content": f"{words} If none fits, answer in words."})
    for case in examples:
        answer = "I have no function for that."
        if case["call"] is not None:  # as the model would write it
            first = {name: values[0] for name, values in case["call"]["arguments"].items()}
            answer = f"{parser.start}{json.dumps({'name': case['call']['name'], 'arguments': first})}{parser.end}"
        turns_before += [{"role": "user", "content": case["ask"]}, {"role": "assistant", "content": answer}]
    options = {"tools": functions} if parser_name is None else {}
    samples = []
    for number, case in enumerate(questions):
        turns = [*turns_before, {"role": "user", "content": case["ask"]}]
        prompt = _render(tokenizer, turns, options)
        ids = list(tokenizer.encode(prompt, add_special_tokens=False))
        expected = "no call" if case["call"] is None else json.dumps(case["call"])
        judge = partial(_judge, tokenizer, prompt, parser, functions, case["call"])
        fields = {"group": f"{shots} shown"}
        samples.append(Sample(str(number), ids, expected, judge, fields))
    return share_prefixes(samples)


def is_expected(calls: list[Call] | None, expected: Call | None) -> bool:
    if calls is None or expected is None:
        return calls == [] and expected is None
    if len(calls) != 1 or calls[0]["name"] != expected["name"]:
        return False
    given, valid = calls[0]["arguments"], expected["arguments"]
    return not given.keys() - valid.keys() and all(given.get(name) in values for name, values in valid.items())


def _judge(
    tokenizer: Any, prompt: str, parser: ToolParser, functions: list[Call], expected: Call | None, text: str
) -> tuple[str, float]:
    answer = without_thoughts(tokenizer, prompt, text)
    calls = None if answer is None else parser.calls(answer, functions)
    return "unreadable" if calls is None else json.dumps(calls), float(is_expected(calls, expected))


def _render(tokenizer: Any, turns: list[dict[str, str]], options: dict[str, Any]) -> str:
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **options))
    except TEMPLATE_ERRORS as error:
        raise ConfigError(f"the model's chat template refuses these turns: {error}. Use --shots 0.") from error
