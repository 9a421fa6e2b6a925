"""`GrammarQueue`: compiles grammars with fair shares for all clients."""

import asyncio
from collections import Counter
from weakref import WeakSet, WeakValueDictionary

from mlx_tq.grammar.constraint import CompiledGrammar, Grammars
from mlx_tq.grammar.grammar_source import GrammarSource
from mlx_tq.server.api_errors import QueueFullError

_SLOTS = 4  # grammars compiled concurrently
_SLOTS_PER_CLIENT = 2  # of these; a client's further requests wait for its own
_MAX_MEMORY = 2**30  # bytes of all compiled grammars


class GrammarQueue:
    """Compiles grammars; one client can use half of `max_waiting`."""

    def __init__(self, grammars: Grammars, max_waiting: int) -> None:
        self._grammars, self._max_waiting = grammars, max_waiting
        self._slots = asyncio.Semaphore(_SLOTS)
        self._client_slots: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._pending: Counter[str] = Counter()  # by client
        self._live: WeakSet[CompiledGrammar] = WeakSet()

    async def compile(self, source: GrammarSource, client: str) -> CompiledGrammar:
        """Compile a grammar for the address `client`; raise `GrammarError` if that fails."""
        if self._pending.total() >= self._max_waiting or self._pending[client] >= max(1, self._max_waiting // 2):
            raise QueueFullError(f"the grammar queue is full ({self._pending.total()} requests); try again later")
        client_slots = self._client_slots.setdefault(client, asyncio.Semaphore(_SLOTS_PER_CLIENT))
        self._pending[client] += 1
        try:
            async with client_slots, self._slots:
                # Requests of the same tools share a matcher, and copies of one take little.
                nbytes = {id(grammar.matcher): grammar.nbytes for grammar in self._live}
                if sum(nbytes.values()) > _MAX_MEMORY:
                    raise QueueFullError("the grammars of other requests fill the memory; try again later")
                grammar = await self._grammars.compile(source)
                self._live.add(grammar)
                return grammar
        finally:
            self._pending[client] -= 1
            self._pending += Counter()  # forgets clients without requests
