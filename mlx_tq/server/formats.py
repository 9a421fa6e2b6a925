"""Compile the `response_format` of requests."""

import asyncio
from weakref import WeakValueDictionary

from llguidance import LLMatcher

from mlx_tq.commands.grammar import Grammars
from mlx_tq.commands.grammar_source import GrammarError, GrammarSource
from mlx_tq.server.errors import InvalidRequestError, QueueFullError
from mlx_tq.server.schemas import ChatRequest, GrammarFormat, ObjectFormat, SchemaFormat, TextFormat

_PARAM = "response_format"
_SLOTS = 4  # grammars that are compiled at once
_SLOTS_PER_CLIENT = 2  # of these; a client's further requests wait for its own


class ResponseFormats:
    """Compiles the grammars of requests, and keeps one client's from delaying those of others.

    Args:
        grammars: of the model's tokenizer.
        queue: requests that may wait.
        allow_lark: accept Lark grammars from clients.
    """

    def __init__(self, grammars: Grammars, queue: int, *, allow_lark: bool) -> None:
        self._grammars, self._queue, self._allow_lark = grammars, queue, allow_lark
        self._slots = asyncio.Semaphore(_SLOTS)
        self._client_slots: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._pending = 0

    async def compile(self, request: ChatRequest, client: str) -> LLMatcher | None:
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
        param = _param(response_format)
        try:
            return await self._compile(_source(response_format), client)
        except GrammarError as error:
            path = ".".join([param, *error.path])
            raise InvalidRequestError(f"{path}: {error}", path) from error

    async def _compile(self, source: GrammarSource, client: str) -> LLMatcher:
        if self._pending >= self._queue:
            raise QueueFullError(f"the grammar queue is full ({self._queue} requests); try again later")
        client_slots = self._client_slots.setdefault(client, asyncio.Semaphore(_SLOTS_PER_CLIENT))
        self._pending += 1
        try:
            async with client_slots, self._slots:
                return await self._grammars.compile(source)
        finally:
            self._pending -= 1


def _param(response_format: ObjectFormat | SchemaFormat | GrammarFormat) -> str:
    if isinstance(response_format, GrammarFormat):
        return f"{_PARAM}.definition"
    return f"{_PARAM}.schema" if isinstance(response_format, ObjectFormat) else f"{_PARAM}.json_schema.schema"


def _source(response_format: ObjectFormat | SchemaFormat | GrammarFormat) -> GrammarSource:
    if isinstance(response_format, GrammarFormat):
        return GrammarSource(response_format.syntax, response_format.definition)
    if isinstance(response_format, ObjectFormat):
        return GrammarSource.of_schema(response_format.described_by or {"type": "object"})
    return GrammarSource.of_schema(response_format.json_schema.described_by)
