"""`CallForm`: how a model writes tool calls. `write_grammar` writes the grammar of answers with calls of that form."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.tool_parsers import json_tools

from mlx_tq.grammar.argument_schema import Schema, make_argument_schema
from mlx_tq.grammar.call_shapes import SHAPES, Shape, write_json
from mlx_tq.grammar.grammar_rules import Rules
from mlx_tq.grammar.grammar_source import GrammarError, GrammarSource

_NAME = re.compile(r"[\w.-]+", re.ASCII)  # that every form can show


@dataclass(frozen=True)
class CallForm:
    """The marks around calls, and the function that parses what is between them; `parser` is its name in mlx-lm."""

    parser: str
    start: str
    end: str
    parse: Callable[[str, Any], Any]

    @classmethod
    def of(cls, tokenizer: Any) -> "CallForm | None":
        """Return the form of a model's calls, or None if mlx-lm cannot parse them."""
        if not tokenizer.has_tool_calling:
            return None
        parse = tokenizer.tool_parser
        return cls(parse.__module__.rpartition(".")[2], tokenizer.tool_call_start, tokenizer.tool_call_end, parse)


GENERIC_FORM = CallForm("json_tools", json_tools.tool_call_start, json_tools.tool_call_end, json_tools.parse_tool_call)


@dataclass(frozen=True)
class Tool:
    name: str
    parameters: Schema | None


class ToolError(GrammarError):
    """No grammar can be written for the calls of `tool`."""

    def __init__(self, message: str, tool: Tool, path: tuple[str, ...] = ()) -> None:
        super().__init__(message, path)
        self.tool = tool


def find_special_tokens(tokenizer: Any) -> dict[str, int]:
    """Map control tokens to their ids; a grammar must refer to them by id, as ordinary text cannot match them."""
    return {token.content: id for id, token in tokenizer.added_tokens_decoder.items() if token.special}


def write_grammar(
    form: CallForm,
    tools: Sequence[Tool],
    special: Mapping[str, int],
    *,
    is_opened: bool = False,
    one_call: bool = False,
    response_format: GrammarSource | None = None,
) -> GrammarSource:
    """Return the grammar of answers that consist of calls; raise `GrammarError` if the form cannot be constrained.

    With `is_opened`, it describes what follows the start mark of one or more calls up to their end mark. With
    `response_format`, an answer may match that instead.
    """
    shape = SHAPES.get(form.parser)
    if shape is None:
        raise GrammarError(
            f"tool calls of mlx-lm's parser {form.parser} cannot be constrained; supported parsers: "
            f"{', '.join(sorted(SHAPES))}. Send tool_choice 'auto', and no response_format"
        )
    rules = Rules(special, form.end)
    if form.parser == "mistral" and "[ARGS]" not in special:
        shape = Shape(write_json, "[", "]", ", ")
    names = []
    for tool in tools:
        try:
            if not _NAME.fullmatch(tool.name):
                raise GrammarError("a tool's name may have letters, digits, '_', '-' and '.'")
            names.append(rules.add(shape.write(rules, tool.name, make_argument_schema(tool.parameters))))
        except GrammarError as error:
            raise ToolError(str(error), tool, error.path) from error
        except (TypeError, AttributeError) as error:  # a schema of a shape that no check has foreseen
            raise ToolError(f"the schema cannot be read: {error}", tool) from error
    call = rules.add(" | ".join(names))
    if shape.between is not None and not one_call:
        call = f"{call} ({rules.text(shape.between)} {call})*"
    marked = " ".join([rules.text(shape.before), call, rules.text(shape.after), rules.text(form.end)])
    if not is_opened:
        marked = rules.add(f"{rules.text(form.start)} {marked}")
        if shape.between is None and not one_call:
            marked = f'{marked} ("\\n"? {marked})*'
    if response_format is not None:
        marked += f" | {rules.text_of(response_format)}"
    return GrammarSource("tool_calls", "\n".join([f"start: {marked}", *rules.lines]))
