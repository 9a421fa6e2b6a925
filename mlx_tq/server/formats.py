"""Compile the `response_format` of requests."""

import asyncio
import json
from collections import Counter
from weakref import WeakSet, WeakValueDictionary

from mlx_tq.cli.grammar import CompiledGrammar, Grammars
from mlx_tq.cli.grammar_source import GrammarError, GrammarSource, Syntax
from mlx_tq.server.errors import InvalidRequestError, QueueFullError
from mlx_tq.server.schemas import ChatRequest, GrammarFormat, ObjectFormat, SchemaFormat, TextFormat

_PARAM = "response_format"
_SLOTS = 4  # grammars that are compiled at once
_SLOTS_PER_CLIENT = 2  # of these; a client's further requests wait for its own
_MAX_MEMORY = 2**30  # bytes of all compiled grammars
_MAX_KEY = 100  # characters of a schema's key that an error repeats


class ResponseFormats:
    """Compiles the grammars of requests, and keeps one client's from delaying those of others.

    Args:
        grammars: of the model's tokenizer.
        queue: requests that may wait, half of them from one client.
        allow_lark: accept Lark grammars from clients.
    """

    def __init__(self, grammars: Grammars, queue: int, *, allow_lark: bool) -> None:
        self._grammars, self._queue, self._allow_lark = grammars, queue, allow_lark
        self._slots = asyncio.Semaphore(_SLOTS)
        self._client_slots: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._pending: Counter[str] = Counter()  # by client
        self._live: WeakSet[CompiledGrammar] = WeakSet()

    async def compile(self, request: ChatRequest, client: str) -> CompiledGrammar | None:
        """Compile the grammar that the answer of a request from the address `client` has to follow.

        Returns None where the answer may be any text.

        Raises:
            InvalidRequestError: a schema or grammar that cannot be followed, or combined with the other arguments.
            QueueFullError: as many requests wait as may.
        """
        response_format = request.response_format
        if response_format is None or isinstance(response_format, TextFormat):
            return None
        if request.tools and request.tool_choice != "none":
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
        param, syntax, text = _read(response_format)
        try:
            return await self._compile(GrammarSource(syntax, text), client)
        except GrammarError as error:
            path = ".".join([param, *(key[:_MAX_KEY] for key in error.path)])
            raise InvalidRequestError(f"{path}: {error}", path) from error

    async def _compile(self, source: GrammarSource, client: str) -> CompiledGrammar:
        if self._pending.total() >= self._queue or self._pending[client] >= max(1, self._queue // 2):
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


def _read(response_format: ObjectFormat | SchemaFormat | GrammarFormat) -> tuple[str, Syntax, str]:
    """Return the argument that holds the grammar, and the grammar."""
    if isinstance(response_format, GrammarFormat):
        return f"{_PARAM}.definition", response_format.syntax, response_format.definition
    if isinstance(response_format, ObjectFormat):
        return f"{_PARAM}.schema", "json_schema", json.dumps(response_format.described_by or {"type": "object"})
    return f"{_PARAM}.json_schema.schema", "json_schema", json.dumps(response_format.json_schema.described_by)
