"""`ResponseFormats`: compiles the `response_format` of requests, with fair shares for all clients."""

import asyncio
from collections import Counter
from typing import Any
from weakref import WeakSet, WeakValueDictionary

from starlette.concurrency import run_in_threadpool

from mlx_tq.grammar.constraint import CompiledGrammar, Grammars
from mlx_tq.grammar.grammar_source import GrammarError, GrammarSource, Syntax
from mlx_tq.server.api_errors import InvalidRequestError, QueueFullError
from mlx_tq.server.schemas import ChatRequest, GrammarFormat, ObjectFormat, SchemaFormat, TextFormat

_PARAM = "response_format"
_SLOTS = 4  # grammars compiled concurrently
_SLOTS_PER_CLIENT = 2  # of these; a client's further requests wait for its own
_MAX_MEMORY = 2**30  # bytes of all compiled grammars
_MAX_KEY = 100  # characters of a schema's key that an error repeats


class ResponseFormats:
    """Compiles grammars; one client can use half of `max_waiting`. Lark grammars only with `allow_lark`."""

    def __init__(self, grammars: Grammars, max_waiting: int, *, allow_lark: bool) -> None:
        self._grammars, self._max_waiting, self._allow_lark = grammars, max_waiting, allow_lark
        self._slots = asyncio.Semaphore(_SLOTS)
        self._client_slots: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._pending: Counter[str] = Counter()  # by client
        self._live: WeakSet[CompiledGrammar] = WeakSet()

    async def compile(self, request: ChatRequest, client: str) -> CompiledGrammar | None:
        """Compile the grammar of a request from the address `client`; return None if any text is allowed."""
        response_format = request.response_format
        if response_format is None or isinstance(response_format, TextFormat):
            return None
        if request.callable_tools:
            raise InvalidRequestError("tools and response_format exclude each other; send one of them", _PARAM)
        if request.prefill is not None:
            raise InvalidRequestError(
                "response_format cannot be combined with a partial assistant message at the end; remove one of them",
                _PARAM,
            )
        if isinstance(response_format, GrammarFormat) and response_format.syntax == "lark" and not self._allow_lark:
            raise InvalidRequestError(
                "Lark grammars are disabled; send a regular expression or a JSON schema, "
                "or restart the server with --allow-lark",
                f"{_PARAM}.syntax",
            )
        param, syntax, definition = _parts_of(response_format)
        try:
            # In a thread, because it may be megabytes.
            source = await run_in_threadpool(_source_of, syntax, definition)
            return await self._compile(source, client)
        except GrammarError as error:
            path = ".".join([_PARAM, param, *(key[:_MAX_KEY] for key in error.path)])
            raise InvalidRequestError(f"{path}: {error}", path) from error

    async def _compile(self, source: GrammarSource, client: str) -> CompiledGrammar:
        if self._pending.total() >= self._max_waiting or self._pending[client] >= max(1, self._max_waiting // 2):
            raise QueueFullError(f"the grammar queue is full ({self._pending.total()} requests); try again later")
        client_slots = self._client_slots.setdefault(client, asyncio.Semaphore(_SLOTS_PER_CLIENT))
        self._pending[client] += 1
        try:
            async with client_slots, self._slots:
                if sum(grammar.nbytes for grammar in self._live) > _MAX_MEMORY:
                    raise QueueFullError("the grammars of other requests fill the memory; try again later")
                grammar = await self._grammars.compile(source)
                self._live.add(grammar)
                return grammar
        finally:
            self._pending[client] -= 1
            self._pending += Counter()  # forgets clients without requests


def _parts_of(response_format: ObjectFormat | SchemaFormat | GrammarFormat) -> tuple[str, Syntax, str | dict[str, Any]]:
    """Return the argument that defines the grammar, its syntax and its value."""
    if isinstance(response_format, GrammarFormat):
        return "definition", response_format.syntax, response_format.definition
    if isinstance(response_format, ObjectFormat):
        return "schema", "json_schema", response_format.schema_ or {"type": "object"}
    return "json_schema.schema", "json_schema", response_format.json_schema.schema_


def _source_of(syntax: Syntax, definition: str | dict[str, Any]) -> GrammarSource:
    return GrammarSource(syntax, definition) if isinstance(definition, str) else GrammarSource.of_schema(definition)
