"""From a request's `response_format` to a compiled grammar."""

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
        """Compile the grammar that the answer has to follow; None where it may be any text.

        Args:
            request: as it came.
            client: its address.

        Raises:
            InvalidRequestError: a schema or grammar that cannot be followed, or combined with the other arguments.
            QueueFullError: as many requests wait as may.
        """
        asked = request.response_format
        if asked is None or isinstance(asked, TextFormat):
            return None
        if request.tools and request.tool_choice != "none":
            raise InvalidRequestError("tools and response_format exclude each other; send one of them", _PARAM)
        if request.prefill is not None:
            raise InvalidRequestError("response_format cannot constrain an answer that the last message begins", _PARAM)
        if isinstance(asked, GrammarFormat) and asked.syntax == "lark" and not self._allow_lark:
            raise InvalidRequestError(
                "this server takes no Lark grammars; send a regular expression or a JSON schema, "
                "or start it with --allow-lark",
                f"{_PARAM}.syntax",
            )
        param = _param(asked)
        try:
            return await self._compile(_source(asked), client)
        except GrammarError as error:
            where = ".".join([param, *error.place])
            raise InvalidRequestError(f"{where}: {error}", where) from error

    async def _compile(self, source: GrammarSource, client: str) -> LLMatcher:
        if self._pending >= self._queue:
            raise QueueFullError(f"{self._queue} requests wait for their grammar, the limit; try again later")
        client_slots = self._client_slots.setdefault(client, asyncio.Semaphore(_SLOTS_PER_CLIENT))
        self._pending += 1
        try:
            async with client_slots, self._slots:
                return await self._grammars.compile(source)
        finally:
            self._pending -= 1


def _param(asked: ObjectFormat | SchemaFormat | GrammarFormat) -> str:
    if isinstance(asked, GrammarFormat):
        return f"{_PARAM}.definition"
    return f"{_PARAM}.schema" if isinstance(asked, ObjectFormat) else f"{_PARAM}.json_schema.schema"


def _source(asked: ObjectFormat | SchemaFormat | GrammarFormat) -> GrammarSource:
    if isinstance(asked, GrammarFormat):
        return GrammarSource(asked.syntax, asked.definition)
    if isinstance(asked, ObjectFormat):
        return GrammarSource.of_schema(asked.described_by or {"type": "object"})
    return GrammarSource.of_schema(asked.json_schema.described_by)
