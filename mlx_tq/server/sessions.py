"""Conversations that the server keeps between requests: each a cache that loses tokens and gets back what it needs.

A client that names its session still sends the whole conversation. What the session has read is not read again, and
where that is not how the conversation goes on (it was edited, or the session was dropped to make room), the session
begins anew with it: a kept session saves time and memory, and no answer depends on it being there.
"""

import asyncio
import logging
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any

from mlx_tq.config import RescueConfig
from mlx_tq.prompt_cache.passes import sequence_in
from mlx_tq.rescue import RescueClient
from mlx_tq.server.conversation import Conversations, Message, Prompt
from mlx_tq.server.errors import InvalidRequestError, QueueFullError
from mlx_tq.server.jobs import Left, SessionCaches, Start
from mlx_tq.server.metrics import Metrics
from mlx_tq.server.schemas import ChatRequest
from mlx_tq.session.plain_text import PlainText
from mlx_tq.session.recall import NOWHERE, archive_warning, live_positions
from mlx_tq.session.settings import SESSION_NAME
from mlx_tq.session.transcript import Transcript, quotation_limit

log = logging.getLogger(__name__)

HEADER = "X-Session-Id"


@dataclass(eq=False)
class Kept:
    """A session. Requests of one session take turns, in the order in which they came.

    Attributes:
        transcript: its tokens, and what left its cache.
        caches: of these tokens; None before the first answer.
        heard: messages that the tokens stand for, the last answer included; None where nothing can follow them.
        options: of the chat template.
        turn: held by the request whose turn it is.
        users: requests that have or wait for it.
    """

    transcript: Transcript
    caches: SessionCaches | None = None
    heard: list[Message] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of a session's caches."""
        return sum(cache.nbytes for cache in self.caches or [])


@dataclass(frozen=True)
class Turn:
    """One request of a session.

    Attributes:
        kept: the session.
        transcript: its own, or a new one where the conversation begins anew.
        messages, options: of the request.
        prompt: all tokens, those that the cache holds included.
        start: where the engine goes on.
    """

    kept: Kept
    transcript: Transcript
    messages: list[Message]
    options: dict[str, Any]
    prompt: Prompt
    start: Start

    @property
    def is_new(self) -> bool:
        """The conversation is read from its beginning."""
        return self.start.caches is None


class Sessions:
    """All that are kept: the least recently used leave first.

    Args:
        limit: how many.
        waiting: requests that may wait for their turn, of all sessions.
        conversations: makes prompts.
        rescue: how evicted text is brought back.
        client: of the rescue service; None without rescue.
        positions: that the model allows, or None.
        metrics: counts.
    """

    def __init__(
        self,
        limit: int,
        waiting: int,
        conversations: Conversations,
        rescue: RescueConfig,
        client: RescueClient | None,
        positions: int | None,
        metrics: Metrics,
    ) -> None:
        self._limit, self._most_waiting, self._conversations = limit, waiting, conversations
        self._rescue, self._client, self._metrics = rescue, client, metrics
        self._plain = PlainText(conversations.tokenizer)
        self._quotation = quotation_limit(rescue, positions)
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._forgotten: list[str] = []  # whose text the service still has
        self._lock = Lock()  # the web side and the engine's thread both drop sessions

    # A turn, on the web side.

    async def enter(self, name: str) -> Kept:
        """The session of this name, when it is this request's turn; `leave` it afterwards.

        Raises:
            InvalidRequestError: no such name can be, or no sessions are kept.
            QueueFullError: too many wait, or every session is in use.
        """
        if not SESSION_NAME.fullmatch(name):
            raise InvalidRequestError(
                f"{HEADER} is {name[:80]!r}; it must be 1 to 64 of the characters A-Z, a-z, 0-9, _ and -", HEADER
            )
        if not self._limit:
            raise InvalidRequestError("this server keeps no sessions; leave the header out", HEADER)
        with self._lock:
            kept = self._kept.get(name)
            if kept is None:
                self._drop(lambda: len(self._kept) >= self._limit)
                if len(self._kept) >= self._limit:
                    raise QueueFullError(f"all of the {self._limit} sessions are in use; try again later")
                kept = self._kept[name] = Kept(self._new_transcript())
            elif kept.users and self._waiting() >= self._most_waiting:
                raise QueueFullError(f"{self._most_waiting} requests wait for their session, the limit; try later")
            self._kept.move_to_end(name)
            kept.users += 1
        try:
            await kept.turn.acquire()
        except BaseException:
            kept.users -= 1
            raise
        return kept

    def leave(self, kept: Kept) -> None:
        """End the turn of a request."""
        kept.users -= 1
        kept.turn.release()

    def begin(self, kept: Kept, request: ChatRequest, *, anew: bool = False) -> Turn:
        """What a request adds to its session, or all of it where it does not follow what the session has heard.

        Raises:
            InvalidRequestError: a conversation that the model's template refuses.
        """
        messages, options = self._conversations.read(request)
        heard = 0 if anew else _heard(kept, messages, options)
        parts = self._conversations.parts(messages, options, heard)
        if parts is None:  # the template shows old answers in another way
            return self.begin(kept, request, anew=True)
        transcript = kept.transcript if heard else self._new_transcript()
        caches = kept.caches if heard else None
        before, named = list(parts.before), NOWHERE
        if heard and before[:1] == transcript.ids[-1:]:  # the answer ended its turn itself
            del before[0]
        words: list[int] = []
        if parts.words is not None:
            words = self._plain.encode(parts.words)
            if caches is not None:
                named = transcript.find(parts.words, live_positions(caches, len(transcript.ids)))
        ids = [*before, *words, *parts.after]
        prompt = Prompt([*transcript.ids, *ids], [transcript.ids, ids], ["assistant", "user"], parts.state)
        quote, reserve = partial(transcript.quoted, named), transcript.longest_quotation(named)
        start = Start(caches, len(transcript.ids), len(before), named, quote, reserve)
        return Turn(kept, transcript, messages, options, prompt, start)

    def settle(self, turn: Turn, left: Left, answer: Message | None) -> None:
        """The turn was answered: its session goes on from there. A turn that was not leaves its session as it was.

        Args:
            turn: of `begin`.
            left: cache and tokens.
            answer: the message that the client got; None where the next request cannot go on behind it.
        """
        kept, transcript = turn.kept, turn.transcript
        assert left.caches is not None  # noqa: S101 - tells the type checker
        if transcript is not kept.transcript:
            self._discard(kept.transcript)
        new = left.tokens[len(transcript.ids) :]
        transcript.read(new, left.quoted, left.at)
        sequence = sequence_in(left.caches)
        if sequence is not None:
            transcript.tell(sequence.take_departed())
        kept.transcript, kept.caches, kept.options = transcript, left.caches, turn.options
        kept.heard = None if answer is None else [*turn.messages, answer]
        self._measure()
        self._metrics.rescued_tokens.inc(len(left.quoted.ids))
        for warning in (archive_warning(left.caches), self._client.take_warning() if self._client else None):
            if warning:
                log.warning(warning)

    def forget(self) -> None:
        """Have the service delete what no session needs any more; what it does not now is tried again the next time."""
        while self._client is not None and self._forgotten:
            session_id = self._forgotten.pop(0)
            if not self._client.forget(session_id):
                self._forgotten.append(session_id)
                break

    async def drop(self, name: str) -> None:
        """Let a session go, if there is one, when its request has ended; one that another request waits for goes on.

        Raises:
            QueueFullError: too many requests wait for their turn.
        """
        if name not in self._kept:
            return
        kept = await self.enter(name)
        with self._lock:
            if kept.users == 1:
                self._discard(self._kept.pop(name).transcript)
            self._measure()
        self.leave(kept)

    def close(self) -> None:
        """Drop all; the service forgets them."""
        with self._lock:
            for kept in self._kept.values():
                self._discard(kept.transcript)
            self._kept.clear()
        self.forget()
        if self._client is not None:
            self._client.close()

    @property
    def limit(self) -> int:
        """How many are kept."""
        return self._limit

    @property
    def rescues(self) -> bool:
        """Text that leaves goes to the rescue service, and what a turn needs of it is quoted."""
        return self._client is not None

    # Room, also for the engine's thread.

    @property
    def nbytes(self) -> int:
        """Of all kept caches."""
        with self._lock:
            return sum(kept.nbytes for kept in self._kept.values())

    def trim_to(self, nbytes: int) -> None:
        """Drop sessions that nobody uses, the least recently used first, until the rest take so many bytes at most."""
        with self._lock:
            self._drop(lambda: sum(kept.nbytes for kept in self._kept.values()) > nbytes)

    def _drop(self, too_many: Callable[[], bool]) -> None:
        for name in [name for name, kept in self._kept.items() if not kept.users]:
            if not too_many():
                break
            self._discard(self._kept.pop(name).transcript)
        self._measure()

    def _measure(self) -> None:
        everyone = list(self._kept.values())
        self._metrics.sessions.set(len(everyone))
        self._metrics.session_bytes.set(sum(kept.nbytes for kept in everyone))

    def _new_transcript(self) -> Transcript:
        # Names at the service are ours: nobody can ask for another's text by guessing the name of a session.
        return Transcript(self._plain, self._client, self._rescue, uuid.uuid4().hex, self._quotation)

    def _discard(self, transcript: Transcript) -> None:
        if self._client is not None and transcript.told:
            self._forgotten.append(transcript.session_id)

    def _waiting(self) -> int:
        return sum(max(0, kept.users - 1) for kept in self._kept.values())


def _heard(kept: Kept, messages: list[Message], options: dict[str, Any]) -> int:
    """How many messages of a request the session has heard: all that it has, or none."""
    heard = kept.heard or []
    follows = messages[: len(heard)] == heard and messages[len(heard) :] and options == kept.options
    return len(heard) if follows else 0
