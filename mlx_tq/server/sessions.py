"""Sessions: conversations whose caches the server keeps between requests.

A client that names its session still sends the whole conversation. The server prefills only what is new; if the
conversation was edited, or the session was dropped to make room, it starts a new one. A session saves time and memory.
Only its own answers depend on what it evicted: caches of a session that evicted tokens are not shared.
"""

import asyncio
import logging
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from threading import RLock
from typing import Any

from mlx_tq.cli.options import Request
from mlx_tq.prompt_cache.layer_group import layer_group_of
from mlx_tq.rescue import RescueClient
from mlx_tq.server.api_errors import InvalidRequestError, QueueFullError
from mlx_tq.server.job import SessionCaches, SessionResult, SessionStart
from mlx_tq.server.job_recall import log_archive_warning
from mlx_tq.server.metrics import Metrics
from mlx_tq.server.prompt_builder import Message, Prompt, PromptBuilder, without_reasoning
from mlx_tq.server.schemas import ChatRequest
from mlx_tq.session.restore import live_positions
from mlx_tq.session.text import SESSION_ID
from mlx_tq.session.transcript import NO_HITS, Transcript, quotation_limit

log = logging.getLogger(__name__)

HEADER = "X-MLX-TQ-Session"


@dataclass(eq=False)
class ServerSession:
    """Caches and transcript of a session, whose requests take turns in the order in which they came."""

    transcript: Transcript
    caches: SessionCaches | None = None  # of the transcript's tokens; None before the first answer
    messages: list[Message] = field(default_factory=list)  # that the transcript encodes
    template_options: dict[str, Any] = field(default_factory=dict)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0  # requests that hold or wait for `turn`

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches or [])


@dataclass(frozen=True)
class SessionTurn:
    """One request of a session; `transcript` is a new one where the conversation starts again."""

    session: ServerSession
    transcript: Transcript
    messages: list[Message]
    template_options: dict[str, Any]
    prompt: Prompt
    start: SessionStart


class Sessions:
    """All sessions: the least recently used are dropped first. `client` is None without rescue."""

    def __init__(
        self,
        settings: Request,
        prompt_builder: PromptBuilder,
        client: RescueClient | None,
        positions: int | None,
        metrics: Metrics,
    ) -> None:
        self.limit, self._max_waiting = settings.args.sessions, settings.args.max_queue
        self._prompt_builder, self._rescue = prompt_builder, settings.rescue
        self._client, self._metrics = client, metrics
        self._plain = prompt_builder.plain
        self._quotation_limit = quotation_limit(settings.rescue, positions)
        self._sessions: OrderedDict[str, ServerSession] = OrderedDict()
        self._to_forget: list[str] = []  # ids whose text the rescue service still has
        self._lock = RLock()  # the web side and the engine's thread both drop sessions
        metrics.sessions.set_function(lambda: len(self._sessions))
        metrics.session_bytes.set_function(lambda: self.nbytes)

    def __len__(self) -> int:
        return len(self._sessions)

    # A turn, on the web side.

    async def enter(self, name: str) -> ServerSession:
        """Wait for this request's turn in its session; call `leave` afterwards."""
        if not SESSION_ID.fullmatch(name):
            raise InvalidRequestError(
                f"{HEADER} is {name[:80]!r}; it must be 1 to 64 of the characters A-Z, a-z, 0-9, _ and -", HEADER
            )
        if not self.limit:
            raise InvalidRequestError("this server has no sessions; leave the header out", HEADER)
        with self._lock:
            session = self._sessions.get(name)
            waiting = sum(max(0, other.users - 1) for other in self._sessions.values())
            if session is None:
                self._drop_while(lambda: len(self._sessions) >= self.limit)
                if len(self._sessions) >= self.limit:
                    raise QueueFullError(f"all {self.limit} sessions are in use; try again later")
                session = self._sessions[name] = ServerSession(self._new_transcript())
            elif session.users and waiting >= self._max_waiting:
                raise QueueFullError(f"{self._max_waiting} requests wait for their session, the limit; try later")
            self._sessions.move_to_end(name)
            session.users += 1
        try:
            await session.turn.acquire()
        except BaseException:
            session.users -= 1
            raise
        return session

    def leave(self, session: ServerSession) -> None:
        session.users -= 1
        session.turn.release()

    def begin(self, session: ServerSession, request: ChatRequest, *, restart: bool = False) -> SessionTurn:
        """Return the turn of a request: what it adds to the session, or all of it if it does not continue that."""
        messages, options = self._prompt_builder.render_input(request)
        cached = session.messages
        is_told = without_reasoning(messages[: len(cached)]) == without_reasoning(cached)
        continues = is_told and messages[len(cached) :] and not restart
        count = len(cached) if continues and options == session.template_options else 0
        parts = self._prompt_builder.split_turn(messages, options, count, session.transcript.ids)
        if parts is None:  # the template shows earlier answers in another way
            return self.begin(session, request, restart=True)
        transcript = session.transcript if count else self._new_transcript()
        caches = session.caches if count else None
        before, user_message, after, state = parts
        if count and before[:1] == transcript.ids[-1:]:  # the answer generated the end of its turn itself
            del before[0]
        search_hits = NO_HITS
        if caches is not None:
            search_hits = transcript.search(user_message, live_positions(caches, len(transcript.ids)))
        ids = [*before, *self._plain.encode(user_message), *after]
        prompt = Prompt([*transcript.ids, *ids], [transcript.ids, ids], state)
        quote, max_quotation = partial(transcript.quote, search_hits), transcript.max_quotation_tokens(search_hits)
        start = SessionStart(caches, len(transcript.ids), len(before), search_hits, quote, max_quotation)
        return SessionTurn(session, transcript, messages, options, prompt, start)

    def commit_turn(self, turn: SessionTurn, result: SessionResult, answer: Message) -> None:
        """Continue the session after a complete answer."""
        session, transcript = turn.session, turn.transcript
        assert result.caches is not None  # noqa: S101 - tells the type checker
        if transcript is not session.transcript:
            self._discard(session.transcript)
        transcript.append(result.tokens[len(transcript.ids) :], result.quotation, result.quotation_start)
        sequence = layer_group_of(result.caches)
        if sequence is not None:
            transcript.send_evicted(sequence.lost)
        session.transcript, session.caches = transcript, result.caches
        session.template_options = turn.template_options
        session.messages = [*turn.messages, self._prompt_builder.answer_message(answer)]
        self._metrics.rescued_tokens.inc(len(result.quotation.ids))
        log_archive_warning(result.caches)
        if self._client is not None and (warning := self._client.take_warning()):
            log.warning(warning)

    def forget_dropped(self) -> None:
        """Delete the text of dropped sessions from the rescue service; failures are retried the next time."""
        if self._client is None:
            return
        with self._lock:
            session_ids, self._to_forget = self._to_forget, []
        while session_ids and self._client.forget(session_ids[0]):
            del session_ids[0]
        with self._lock:
            self._to_forget += session_ids[1:] + session_ids[:1]

    async def drop(self, name: str) -> None:
        """Drop a session when its request has ended, unless another request waits for it."""
        if name not in self._sessions:
            return
        session = await self.enter(name)
        with self._lock:
            if session.users == 1:
                self._discard(self._sessions.pop(name).transcript)
        self.leave(session)

    def close(self) -> None:
        with self._lock:
            for session in self._sessions.values():
                self._discard(session.transcript)
            self._sessions.clear()
        self.forget_dropped()

    # Memory; the engine's thread calls these, too.

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(session.nbytes for session in self._sessions.values())

    def all_caches(self) -> list[SessionCaches]:
        with self._lock:
            return [session.caches for session in self._sessions.values() if session.caches is not None]

    def trim_to(self, nbytes: int) -> None:
        """Drop idle sessions, the least recently used first, until the rest take at most `nbytes`."""
        with self._lock:
            self._drop_while(lambda: self.nbytes > nbytes)

    def _drop_while(self, too_many: Callable[[], bool]) -> None:
        for name in [name for name, session in self._sessions.items() if not session.users]:
            if not too_many():
                break
            self._discard(self._sessions.pop(name).transcript)

    def _new_transcript(self) -> Transcript:
        # The rescue service gets ids of ours: no client can read another's text by guessing a session's name.
        return Transcript(self._plain, self._client, self._rescue, uuid.uuid4().hex, self._quotation_limit)

    def _discard(self, transcript: Transcript) -> None:
        if self._client is not None and transcript.has_sent:
            with self._lock:
                self._to_forget.append(transcript.session_id)
