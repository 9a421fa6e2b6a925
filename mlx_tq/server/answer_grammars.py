"""`AnswerGrammars`: what the answer to a request has to follow, by its `response_format` and its tools."""

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.concurrency import run_in_threadpool

from mlx_tq.grammar.argument_schema import make_argument_schema
from mlx_tq.grammar.call_grammar import CallForm, Tool, ToolError, write_grammar
from mlx_tq.grammar.constraint import CompiledGrammar
from mlx_tq.grammar.grammar_source import GrammarError, GrammarSource, Syntax
from mlx_tq.grammar.sandbox import GrammarLimitError
from mlx_tq.server.api_errors import ApiError, InvalidRequestError, QueueFullError
from mlx_tq.server.grammar_queue import GrammarQueue
from mlx_tq.server.schemas import ChatRequest, GrammarFormat, ObjectFormat, SchemaFormat, TextFormat
from mlx_tq.server.tool_choice import ToolChoice

log = logging.getLogger(__name__)

_FORMAT, _CHOICE, _TOOLS = "response_format", "tool_choice", "tools"
_PREFILL = "{} cannot be combined with a partial assistant message at the end; remove one of them"
_THOUGHT = "{} cannot be combined with reasoning at the end; end with a user message or a tool result, or remove one"
_MAX_KEY = 100  # characters of a schema's key or a tool's name that an error repeats
_MAX_FAILED = 256  # messages in the log, and grammars that are not tried again
_RETRY_S = 60.0  # after which a grammar that exceeded a limit is tried again


@dataclass(frozen=True)
class AnswerGrammar:
    """A compiled grammar, and the marker after which it applies, or "" where it describes the whole answer.

    `param` is the request's argument that it came from.
    """

    compiled: CompiledGrammar
    call_start: str = ""
    param: str = _FORMAT


class AnswerGrammars:
    """Compiles the grammars of requests. Lark grammars are accepted only with `allow_lark`.

    `find_form` returns the form of the model's tool calls; `special` are the ids of its control tokens.
    """

    def __init__(
        self, queue: GrammarQueue, find_form: Callable[[], CallForm], special: Mapping[str, int], *, allow_lark: bool
    ) -> None:
        self._queue, self._find_form, self._special, self._allow_lark = queue, find_form, special, allow_lark
        self._logged: set[str] = set()
        self._failed: OrderedDict[int, float] = OrderedDict()  # hashes of sources, and when each may be tried again

    async def compile(self, request: ChatRequest, client: str) -> AnswerGrammar | None:
        """Compile the grammar of a request from the address `client`; return None if any text is allowed.

        If calls are optional and their grammar cannot be compiled, return None and log a warning; otherwise raise
        `InvalidRequestError`.
        """
        source = compiled = None
        response_format = request.response_format
        if response_format is not None and not isinstance(response_format, TextFormat):
            self._check_format(request, response_format)
            param, syntax, definition = _parts_of(response_format)
            try:
                # In a thread, because it may be megabytes.
                source = await run_in_threadpool(_source_of, syntax, definition)
                compiled = await self._queue.compile(source, client)
            except GrammarError as error:
                path = ".".join([_FORMAT, param, *(key[:_MAX_KEY] for key in error.path)])
                raise InvalidRequestError(f"{path}: {error}", path) from error
        if request.callable_tools:
            return await self._compile_calls(request, source, client)
        return None if compiled is None else AnswerGrammar(compiled)

    def _check_format(self, request: ChatRequest, response_format: ObjectFormat | SchemaFormat | GrammarFormat) -> None:
        _check_end(request, _FORMAT)
        if not isinstance(response_format, GrammarFormat) or response_format.syntax != "lark":
            return
        if not self._allow_lark:
            raise InvalidRequestError(
                "Lark grammars are disabled; send a regular expression or a JSON schema, "
                "or restart the server with --allow-lark",
                f"{_FORMAT}.syntax",
            )
        if request.callable_tools:
            message = "a Lark grammar cannot be combined with tools; send a JSON schema, or leave tools out"
            raise InvalidRequestError(message, f"{_FORMAT}.syntax")

    # Tool calls.

    async def _compile_calls(
        self, request: ChatRequest, response_format: GrammarSource | None, client: str
    ) -> AnswerGrammar | None:
        choice = request.tool_choice or ToolChoice(mode="auto")
        if choice.mode == "required":
            response_format = None
            _check_end(request, _CHOICE)
        is_opened = choice.mode == "auto" and response_format is None
        form = await run_in_threadpool(self._find_form)
        tools = [_tool_of(tool["function"]) for tool in request.sorted_tools]
        tools = [tool for tool in tools if choice.names is None or tool.name in choice.names]
        write = partial(
            write_grammar,
            *(form, tools, self._special),
            is_opened=is_opened,
            one_call=request.has_one_call,
            response_format=response_format,
        )
        if is_opened and choice.names is None:
            compiled = await self._compile_optional(write, tools, client)
            return None if compiled is None else AnswerGrammar(compiled, form.start, _TOOLS)
        param = _CHOICE if response_format is None else _FORMAT
        source = await run_in_threadpool(_write, write, param)
        try:
            compiled = await self._queue.compile(source, client)
        except GrammarError as error:
            raise await self._call_error(error, tools, client, param) from error
        return AnswerGrammar(compiled, form.start if is_opened else "", _TOOLS)

    async def _compile_optional(
        self, write: Callable[[], GrammarSource], tools: list[Tool], client: str
    ) -> CompiledGrammar | None:
        """Compile the grammar of optional calls; if that fails, log the reason once."""
        try:
            source = await run_in_threadpool(_write, write, _TOOLS)
            if self._failed.get(hash(source), 0.0) > time.monotonic():
                return None
            return await self._compile_tools(source, tools, client)
        except QueueFullError:
            raise
        except (ApiError, RuntimeError) as error:  # the latter if the sandbox does not start
            reason = str(error)
        if reason not in self._logged and len(self._logged) < _MAX_FAILED:
            self._logged.add(reason)
            log.warning("tool calls are not constrained: %s", reason)
        return None

    async def _compile_tools(self, source: GrammarSource, tools: list[Tool], client: str) -> CompiledGrammar:
        """Compile the grammar of `tools`, and remember if that fails."""
        try:
            return await self._queue.compile(source, client)
        except GrammarError as error:
            may_pass = isinstance(error, GrammarLimitError)  # on a less busy machine
            self._failed[hash(source)] = time.monotonic() + _RETRY_S if may_pass else math.inf
            self._failed.move_to_end(hash(source))
            if len(self._failed) > _MAX_FAILED:
                self._failed.popitem(last=False)
            raise await self._call_error(error, tools, client, _TOOLS) from error

    async def _call_error(self, error: GrammarError, tools: list[Tool], client: str, param: str) -> InvalidRequestError:
        """Return an error that names the tool at fault, or `param` if none is."""
        for tool in tools:
            try:
                await self._queue.compile(GrammarSource.of_schema(make_argument_schema(tool.parameters)), client)
            except GrammarError as tool_error:
                return _tool_error(tool, tool_error)
        return InvalidRequestError(f"{param}: {error}", param)


def _check_end(request: ChatRequest, param: str) -> None:
    """Refuse an answer that is begun where a grammar holds from its start."""
    if request.prefill is not None:
        raise InvalidRequestError((_PREFILL if request.prefill.content else _THOUGHT).format(param), param)


def _tool_of(function: dict[str, Any]) -> Tool:
    parameters = function.get("parameters")
    return Tool(str(function.get("name", "")), parameters if isinstance(parameters, dict) else None)


def _write(write: Callable[[], GrammarSource], param: str) -> GrammarSource:
    """Write a grammar of calls; raise `InvalidRequestError`, which names the tool at fault, or `param` if none is."""
    try:
        return write()
    except ToolError as error:
        raise _tool_error(error.tool, error) from error
    except GrammarError as error:
        raise InvalidRequestError(f"{param}: {error}", param) from error


def _tool_error(tool: Tool, error: GrammarError) -> InvalidRequestError:
    place = ".".join(["parameters", *(key[:_MAX_KEY] for key in error.path)])
    return InvalidRequestError(f"no grammar can be built for tool {tool.name[:_MAX_KEY]!r}: {place}: {error}", _TOOLS)


def _parts_of(response_format: ObjectFormat | SchemaFormat | GrammarFormat) -> tuple[str, Syntax, str | dict[str, Any]]:
    """Return the argument that defines the grammar, its syntax and its value."""
    if isinstance(response_format, GrammarFormat):
        return "definition", response_format.syntax, response_format.definition
    if isinstance(response_format, ObjectFormat):
        return "schema", "json_schema", response_format.schema_ or {"type": "object"}
    return "json_schema.schema", "json_schema", response_format.json_schema.schema_


def _source_of(syntax: Syntax, definition: str | dict[str, Any]) -> GrammarSource:
    return GrammarSource(syntax, definition) if isinstance(definition, str) else GrammarSource.of_schema(definition)
