"""The routes: from an HTTP request to jobs for the engine, and from their events to a response."""

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic_core import from_json
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from mlx_tq.rescue import RescueClient
from mlx_tq.server import messages_answer, ollama_answer, schemas
from mlx_tq.server.answers import Answer, Object, ResponseAnswer
from mlx_tq.server.api_errors import (
    ERROR_HEADERS,
    ApiError,
    ClientDisconnectedError,
    InvalidRequestError,
    ModelNotFoundError,
    UnavailableError,
)
from mlx_tq.server.compacted_answer import CompactedAnswer
from mlx_tq.server.embeddings import embed, embedder_objects
from mlx_tq.server.guard import Guard, LargeRequests
from mlx_tq.server.job import Event, Job, Piece, PrefillProgress
from mlx_tq.server.messages_answer import MessagesAnswer
from mlx_tq.server.messages_schemas import MessagesRequest
from mlx_tq.server.metrics import ServerMetrics
from mlx_tq.server.model_pool import DEFAULT_MODEL, ModelPool, PooledModel
from mlx_tq.server.model_service import ModelService
from mlx_tq.server.ollama_answer import OllamaAnswer
from mlx_tq.server.ollama_schemas import OllamaChat, OllamaModelName, OllamaPrompt
from mlx_tq.server.schemas import (
    Body,
    ChatRequest,
    CompactionTrigger,
    CompletionRequest,
    EmbeddingRequest,
    ResponseRequest,
)
from mlx_tq.server.sessions import HEADER, SessionTurn
from mlx_tq.server.web import HEADERS, PAGE, SCRIPTS

log = logging.getLogger(__name__)

Result = TypeVar("Result")
Handler = Callable[[Request], Response | Awaitable[Response]]

_PUBLIC = {"/", "/page/{name:path}", "/health"}  # paths that anybody may call
_INTERNAL_ERROR = "internal error; see the server's log"
_FIELD = re.compile(r"[\w.-]{1,64}", re.ASCII)  # of a request, as a header may name it
_MAX_IGNORED, _MAX_LOGGED_FIELDS = 16, 1000  # in a header, and in all of the log


class Api:
    """Handles requests. Fields that it does not know are ignored and named, or errors if `is_strict`."""

    def __init__(
        self, pool: ModelPool, guard: Guard, rescue: RescueClient | None = None, *, is_strict: bool = False
    ) -> None:
        self._pool, self._guard, self._rescue, self._is_strict = pool, guard, rescue, is_strict
        self._logged_fields: set[str] = set()
        self._large_requests = LargeRequests()
        self._metrics = ServerMetrics({model.name: model.metrics for model in pool.models})
        self._tasks: set[asyncio.Task[None]] = set()
        self._unfinished: set[asyncio.Queue[Event]] = set()  # of answers

    def stop(self) -> None:
        """End all answers with an error, even during a long engine step. Only the event loop may call this."""
        self._pool.stop()
        for events in self._unfinished:
            events.put_nowait(UnavailableError("the server is stopping"))

    def app(self, origins: list[str], load: Callable[[], Coroutine[Any, Any, None]]) -> Starlette:
        """Return the ASGI application. It calls `load` and takes requests meanwhile; the caller ends the engines."""

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            loading = asyncio.create_task(load())
            yield
            loading.cancel()

        handlers: dict[tuple[str, str], Handler] = {
            ("POST", "/v1/chat/completions"): partial(self._complete, ChatRequest),
            ("POST", "/v1/completions"): partial(self._complete, CompletionRequest),
            ("POST", "/v1/responses"): self._respond,
            ("POST", "/v1/responses/compact"): self._compact,
            ("POST", "/v1/responses/input_tokens"): self._count_response_tokens,
            ("POST", "/v1/messages"): self._message,
            ("POST", "/v1/messages/count_tokens"): self._count_tokens,
            ("POST", "/api/chat"): partial(self._answer_ollama, OllamaChat),
            ("POST", "/api/generate"): partial(self._answer_ollama, OllamaPrompt),
            ("POST", "/api/show"): self._show,
            ("GET", "/api/tags"): lambda _: self._list_ollama(self._pool.models),
            ("GET", "/api/ps"): lambda _: self._list_ollama([m for m in self._pool.models if m.service is not None]),
            ("GET", "/api/version"): lambda _: JSONResponse({"version": ollama_answer.API_VERSION}),
            ("POST", "/v1/embeddings"): self._embed,
            ("POST", "/v1/estimate"): self._estimate,
            ("GET", "/v1/models"): self._list_models,
            ("GET", "/v1/models/{name:path}"): self._model,
            ("GET", "/v1/plan"): self._plan,
            ("GET", "/props"): self._props,
            ("DELETE", "/v1/sessions/{name}"): self._drop_session,
            ("POST", "/cache/clear"): self._clear_stored_prompts,
            ("GET", "/status"): self._status,
            ("GET", "/metrics"): lambda _: Response(generate_latest(self._metrics), media_type=CONTENT_TYPE_LATEST),
            ("GET", "/health"): self._health,
            ("GET", "/"): lambda _: HTMLResponse(PAGE, headers=HEADERS),
            ("GET", "/page/{name:path}"): _script,
        }
        methods = ["GET", "POST", "DELETE"]
        cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=methods, allow_headers=["*"])
        app = Starlette(
            routes=[
                Route(route, partial(self._handle, path, handler), methods=[method])
                for (method, path), handler in handlers.items()
                for route in dict.fromkeys([path, path.removeprefix("/v1")])  # some clients leave /v1 out
            ],
            lifespan=lifespan,
            middleware=[cors] if origins else [],
            exception_handlers={HTTPException: _handle_http_error},
        )
        app.router.redirect_slashes = False  # a redirect would go to any host that the request names, before the guard
        return app

    async def _handle(self, path: str, handler: Handler, request: Request) -> Response:
        """Run a handler; whatever it raises becomes a response in the API's shape."""
        request.state.path, request.state.started = path, time.perf_counter()
        try:
            if path not in _PUBLIC:
                self._guard.check_caller(request)
            result = handler(request)
            response = result if isinstance(result, Response) else await result
        except ApiError as api_error:
            request.state.refusal = api_error
            response = _error_response(request, api_error)
        except ClientDisconnect:
            response = _error_response(
                request, ClientDisconnectedError("the client disconnected while it sent its request")
            )
        except Exception:
            log.exception("internal error")
            response = _error_response(request, ApiError(_INTERNAL_ERROR))
        self._metrics.requests.labels(path, response.status_code).inc()
        if not isinstance(response, AnswerStream):  # which logs its end
            _log_end(request, response.status_code)
        return response

    @asynccontextmanager
    async def _acquire(self, request: Request, model: str | None) -> AsyncIterator[ModelService]:
        """Yield a model, which is loaded if need be and stays loaded in the block."""
        service = await _run_until_disconnect(request, self._pool.acquire(model))
        try:
            yield service
        finally:
            self._pool.release(service)

    # Routes without generation.

    def _health(self, request: Request) -> Response:
        if not self._pool.is_ready:
            raise UnavailableError("loading the model; try again later")
        engines = [service.engine for service in self._pool.services]
        if not all(engine.is_healthy for engine in engines):
            raise UnavailableError("the engine has ended; start the server again")
        if any(engine.is_stalled for engine in engines):
            raise UnavailableError(
                "one engine step has taken more than 2 minutes; restart the server, and if the model is just slow, "
                "lower --prefill-step-size"
            )
        return JSONResponse({"status": "ok"})

    def _status(self, _: Request) -> Response:
        models = [
            {**self._pool.describe(model), "status": None if model.service is None else model.service.status()}
            for model in self._pool.models
        ]
        return JSONResponse({"models": models})

    async def _clear_stored_prompts(self, request: Request) -> Response:
        """Remove the prompts in memory of all models, and answer as benchmark clients (mlx_chronos) expect."""
        for service in self._pool.services:
            await _run_until_disconnect(request, service.engine.clear_stored_prompts())
        return JSONResponse({"scheduler_cache_cleared": True})

    async def _list_models(self, _: Request) -> Response:
        models = [self._pool.describe(model) for model in self._pool.models]
        embedders = await embedder_objects(self._rescue, self._pool.created)
        return JSONResponse({"object": "list", "data": [*models, *embedders]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        try:
            return JSONResponse(self._pool.describe(self._pool.find(name)))
        except ModelNotFoundError:
            for embedder in await embedder_objects(self._rescue, self._pool.created):
                if embedder["id"] == name:
                    return JSONResponse(embedder)
            raise

    async def _plan(self, request: Request) -> Response:
        async with self._acquire(request, request.query_params.get("model")) as service:
            return JSONResponse(service.report())

    def _props(self, request: Request) -> Response:
        """Return what clients of llama.cpp ask for before a prompt."""
        model = self._pool.find(request.query_params.get("model"), takes_any=True)
        return JSONResponse({"default_generation_settings": {"n_ctx": self._pool.describe(model)["max_model_len"]}})

    def _list_ollama(self, models: Sequence[PooledModel]) -> Response:
        return JSONResponse({"models": [ollama_answer.describe(model, self._pool.created) for model in models]})

    async def _show(self, request: Request) -> Response:
        name = (await self._parse_body(request, OllamaModelName)).served_name
        model, capabilities = self._pool.find(name, takes_any=True), ["completion"]
        if (service := model.service) is not None:
            self._pool.retain(service)
            try:
                capabilities = await run_in_threadpool(service.capabilities)
            finally:
                self._pool.release(service)
        return JSONResponse(ollama_answer.show(model, self._pool.created, capabilities))

    async def _drop_session(self, request: Request) -> Response:
        """Drop the sessions of a name; each model that is loaded may have one."""
        services = self._pool.services
        for service in services:  # before the first wait, during which another could be unloaded
            self._pool.retain(service)
        try:
            for service in services:
                await _run_until_disconnect(request, service.sessions.drop(request.path_params["name"]))
                await run_in_threadpool(service.sessions.forget_dropped)
        finally:
            for service in services:
                self._pool.release(service)
        return Response(status_code=204)

    async def _embed(self, request: Request) -> Response:
        body = await self._parse_body(request, EmbeddingRequest)
        return JSONResponse(await embed(body, self._rescue, DEFAULT_MODEL))

    async def _estimate(self, request: Request) -> Response:
        """Return what an answer to a chat, or to a completion, would take, without generating it."""
        body = await self._parse_with(request, _parse_prompt)
        async with self._acquire(request, body.model) as service:
            work = self._large_requests.run(request.state.nbytes, service.estimate, body)
            return JSONResponse(await _run_until_disconnect(request, work))

    # Routes with generation.

    async def _parse_body(self, request: Request, kind: type[Body]) -> Body:
        return await self._parse_with(request, partial(schemas.parse, kind))

    async def _parse_with(self, request: Request, parse: Callable[[bytes, set[str] | None], Result]) -> Result:
        """Read and parse a body; `parse` gets a set for the names of ignored fields, or None if they are errors."""
        content = await self._guard.read_body(request)
        request.state.nbytes, ignored = len(content), None if self._is_strict else set[str]()
        # Parsing a large body holds the GIL; several in turn would block the event loop.
        work = self._large_requests.run(len(content), parse, content, ignored)
        body = await _run_until_disconnect(request, work)
        request.state.ignored = sorted(name for name in ignored or () if _FIELD.fullmatch(name))[:_MAX_IGNORED]
        if new := self._new_fields(request.state.ignored):
            log.warning("fields of requests that this server ignores: %s", ", ".join(new))
        return body

    def _new_fields(self, ignored: list[str]) -> list[str]:
        """Return the ignored fields that no request had before."""
        new = [name for name in ignored if name not in self._logged_fields]
        room = max(0, _MAX_LOGGED_FIELDS - len(self._logged_fields))
        self._logged_fields.update(new[:room])
        return new[:room]

    async def _complete(self, kind: type[ChatRequest] | type[CompletionRequest], request: Request) -> Response:
        body = await self._parse_body(request, kind)
        return await self._generate(request, body, partial(Answer, is_chat=kind is ChatRequest))

    async def _respond(self, request: Request) -> Response:
        body = await self._parse_body(request, ResponseRequest)
        make_answer = CompactedAnswer if body.asks_for_summary else ResponseAnswer
        return await self._generate_response(request, body, partial(make_answer, request=body))

    async def _compact(self, request: Request) -> Response:
        """Return what takes the place of a conversation: its user messages, and a summary by the model."""
        body = await self._parse_body(request, ResponseRequest)
        body.stream, body.input = None, [*body.items, CompactionTrigger()]
        return await self._generate_response(request, body, partial(CompactedAnswer, request=body, replaces_input=True))

    async def _generate_response(
        self, request: Request, body: ResponseRequest, make_answer: Callable[..., Answer]
    ) -> Response:
        with _response_names():
            return await self._generate(request, await run_in_threadpool(body.to_chat), make_answer)

    async def _count_response_tokens(self, request: Request) -> Response:
        body = await self._parse_body(request, ResponseRequest)
        with _response_names():
            tokens, _ = await self._count_prompt_tokens(request, await run_in_threadpool(body.to_chat))
        return JSONResponse({"object": "response.input_tokens", "input_tokens": tokens})

    async def _message(self, request: Request) -> Response:
        return await self._generate(request, await self._messages_chat(request), MessagesAnswer)

    async def _count_tokens(self, request: Request) -> Response:
        tokens, scale = await self._count_prompt_tokens(request, await self._messages_chat(request))
        return JSONResponse({"input_tokens": round(scale * tokens)})

    async def _answer_ollama(self, kind: type[OllamaChat] | type[OllamaPrompt], request: Request) -> Response:
        body = await self._parse_body(request, kind)
        if body.only_loads:
            async with self._acquire(request, body.served_name):
                return JSONResponse(ollama_answer.load_body(body.model, is_chat=kind is OllamaChat))
        generation = await run_in_threadpool(body.to_request)
        make_answer = partial(OllamaAnswer, model=body.model, is_chat=kind is OllamaChat)
        return await self._generate(request, generation, make_answer)

    async def _count_prompt_tokens(self, request: Request, chat: ChatRequest) -> tuple[int, float]:
        """Return the tokens of a prompt, and what /v1/messages multiplies them by."""
        async with self._acquire(request, chat.model) as service:
            work = self._large_requests.run(request.state.nbytes, service.count_tokens, chat)
            return await _run_until_disconnect(request, work), service.usage_scale

    async def _messages_chat(self, request: Request) -> ChatRequest:
        body = await self._parse_body(request, MessagesRequest)
        return await run_in_threadpool(body.to_chat)

    async def _generate(
        self, request: Request, body: ChatRequest | CompletionRequest, make_answer: Callable[..., Answer]
    ) -> Response:
        """Generate the answer. A stream starts when the job joins the batch, so that refusals have an HTTP status."""
        async with self._acquire(request, body.model) as service:
            session_name = request.headers.get(HEADER)
            grammar = session = finishing = None
            if session_name is not None:
                service.check_turn(body)
            if isinstance(body, ChatRequest):
                client = request.client.host if request.client else ""
                grammar = await _run_until_disconnect(request, service.answer_grammars.compile(body, client))
            if session_name is not None:  # last, because a new session may take another's place
                session = await _run_until_disconnect(request, service.sessions.enter(session_name))
            try:
                preparation = (service.prepare, body, make_answer, session, grammar)
                work = self._large_requests.run(request.state.nbytes, *preparation)
                jobs, answer, turn = await _run_until_disconnect(request, work)
                request.state.answer = answer
                for other in self._pool.services:
                    other.engine.cancel_ahead()
                service.engine.submit(*jobs)
            except BaseException:
                if session is not None:
                    service.sessions.leave(session)
                raise
            if turn is not None:
                finishing = self._spawn(self._finish_turn(service, turn, jobs[0], answer))
            # No request continues a summary.
            elif isinstance(body, ChatRequest) and not isinstance(answer, CompactedAnswer):
                self._spawn(self._prepare_next(service, body, jobs[0], answer))
            max_tokens = min(job.max_tokens for job in jobs)
            headers = {"X-Max-Tokens": str(max_tokens)} if max_tokens < (body.answer_tokens or 0) else {}
            if request.state.ignored:
                headers["X-Ignored"] = ", ".join(request.state.ignored)
            events = self._events(service, jobs, answer)

            async def respond() -> Response:
                await _add(answer, await anext(events))
                if body.stream:
                    stream = self._stream(request, events, finishing, usage=body.wants_usage)
                    return AnswerStream(request, stream, {"Cache-Control": "no-cache", **headers})
                async for event in events:
                    await _add(answer, event)
                if finishing is not None:
                    await asyncio.shield(finishing)
                return JSONResponse(answer.body(), headers=headers)

            try:
                return await _run_until_disconnect(request, respond())
            except BaseException:
                await events.aclose()
                raise

    async def _finish_turn(self, service: ModelService, turn: SessionTurn, job: Job, answer: Answer) -> None:
        """End a session's turn when its job is removed from the engine and its events were read."""
        sessions = service.sessions
        self._pool.retain(service)
        try:
            result = await job.session_result.get()
            await job.events_closed.wait()
            if result.caches is not None and answer.is_all_generated:
                await run_in_threadpool(sessions.commit_turn, turn, result, answer.message())
                answer.session = service.session_report(result)
        except Exception:
            log.exception("cannot continue a session")  # its next request continues from the answer before
        finally:
            sessions.leave(turn.session)
            self._pool.release(service)
        self._spawn(run_in_threadpool(sessions.forget_dropped))

    async def _prepare_next(self, service: ModelService, body: ChatRequest, job: Job, answer: Answer) -> None:
        """Prefill, while nothing else runs, what the next prompt of a conversation begins with."""
        await job.events_closed.wait()
        service.keep_thoughts(body, answer)
        message = answer.message()
        if not answer.is_complete or "tool_calls" in message or job.others or body.prefill:
            return
        self._pool.retain(service)
        try:
            with suppress(ApiError):  # the next request will get the same error
                ahead = await run_in_threadpool(service.job_ahead, body, message)
                if ahead is not None and not any(other.engine.is_busy for other in self._pool.services):
                    service.engine.prefill_ahead(ahead)
        finally:
            self._pool.release(service)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` in the background; asyncio may drop a task that nothing refers to."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _events(self, service: ModelService, jobs: list[Job], answer: Answer) -> AsyncGenerator[Event]:
        """Yield the events of jobs, which share a queue, and raise their errors.

        Closing it early cancels the jobs, as does an answer that is complete before them, unless a session continues
        from all that its job generates.
        """
        metrics, started, first_token, ended = service.metrics, time.perf_counter(), True, False
        unfinished, queue = sum(len(job.answers) for job in jobs), jobs[0].events
        self._unfinished.add(queue)
        self._pool.retain(service)  # until the last event of a stream was read
        try:
            while not ended:
                event = await queue.get()
                if isinstance(event, ApiError):
                    ended = True
                    raise event
                if isinstance(event, Piece):
                    if first_token:
                        metrics.first_token_seconds.observe(time.perf_counter() - started)
                    first_token, unfinished = False, unfinished - (event.finish_reason is not None)
                    ended = not unfinished
                yield event
                ended = ended or (answer.is_complete and jobs[0].session is None)
        finally:
            self._unfinished.discard(queue)
            self._pool.release(service)
            for job in jobs:
                job.events_closed.set()
                service.engine.cancel(job)
            if not ended:
                metrics.disconnects.inc()

    async def _stream(
        self, request: Request, events: AsyncGenerator[Event], finishing: asyncio.Task[None] | None, *, usage: bool
    ) -> AsyncIterator[str]:
        """Yield server-sent events."""
        answer: Answer = request.state.answer
        try:
            for value in answer.start_events():
                yield answer.event_text(value)
            async for event in events:
                if isinstance(event, PrefillProgress) and answer.comments_progress:
                    yield f": prefill {event.done} of {event.total} tokens\n\n"
                for value in await _add(answer, event):
                    yield answer.event_text(value)
            if finishing is not None:
                await asyncio.shield(finishing)
            for value in answer.end_events(usage=usage):
                yield answer.event_text(value)
            yield answer.stream_end
        except ApiError as error:
            request.state.error = error
            yield answer.event_text(answer.error_event(error))
        except Exception:
            log.exception("internal error")
            request.state.error = ApiError(_INTERNAL_ERROR)
            yield answer.event_text(answer.error_event(request.state.error))
        finally:
            await events.aclose()


class AnswerStream(StreamingResponse):
    """The stream of an answer. Its end is logged, even if the client disconnects earlier."""

    def __init__(self, request: Request, stream: AsyncIterator[str], headers: dict[str, str]) -> None:
        super().__init__(stream, media_type=request.state.answer.media_type, headers=headers)
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            state = self._request.state
            is_ended = state.answer.is_complete or hasattr(state, "error")
            _log_end(self._request, self.status_code if is_ended else ClientDisconnectedError.status)


def _script(request: Request) -> Response:
    """Return a script of the chat page."""
    script = SCRIPTS.get(request.path_params["name"])
    if script is None:
        raise InvalidRequestError("unknown route", status=404)
    return Response(script, media_type="text/javascript", headers=HEADERS)


@contextmanager
def _response_names() -> Iterator[None]:
    """Let errors name the arguments of /v1/responses, which become those of a chat in the block."""
    try:
        yield
    except InvalidRequestError as error:
        schemas.use_response_names(error)
        raise


def _log_end(request: Request, status: int) -> None:
    """Log a request that has ended, and the tokens of its answer if it has one."""
    state, now = request.state, time.perf_counter()
    facts = [f"{1e3 * (now - state.started):.0f} ms"]
    if status == ClientDisconnectedError.status:
        facts.append("the client disconnected")
    if hasattr(state, "error"):
        facts.append(f"error {state.error.code} in the stream")
    if (refusal := getattr(state, "refusal", None)) is not None:
        param = refusal.param or ""
        facts.append(f"{refusal.code}{f' ({param})' if _FIELD.fullmatch(param) else ''}")
    answer: Answer | None = getattr(state, "answer", None)
    if answer is not None:
        facts.append(f"{answer.prompt_tokens} prompt tokens ({answer.cached_tokens} cached)")
        facts.append(f"{answer.completion_tokens} completion tokens")
        first, last = answer.first_token_at, answer.last_token_at
        if answer.completion_tokens:
            facts.append(f"first token after {1e3 * (first - state.started):.0f} ms")
        if last > first:
            facts.append(f"{(answer.completion_tokens - 1) / (last - first):.1f} tokens/s")
    log.info("%s %s %d %s", request.method, state.path, status, ", ".join(facts))


def _error_response(request: Request, error: ApiError) -> JSONResponse:
    """Return an error in the shape of the API that the route belongs to."""
    path = request.url.path
    if path.removeprefix("/v1").startswith("/messages"):
        body = messages_answer.error_body(error)
    else:
        body = ollama_answer.error_body(error) if path.startswith("/api/") else error.body()
    return JSONResponse(body, error.status, ERROR_HEADERS.get(error.status))


def _parse_prompt(content: bytes, ignored: set[str] | None) -> ChatRequest | CompletionRequest:
    """Parse the body of a chat, which has messages, or of a completion."""
    with suppress(ValueError):  # which parsing it as a completion reports
        value = from_json(content)
        if isinstance(value, dict) and "messages" in value:
            return schemas.parse(ChatRequest, content, ignored)
    return schemas.parse(CompletionRequest, content, ignored)


async def _handle_http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    message = f"this route does not support {request.method}" if status == 405 else "unknown route"
    return _error_response(request, InvalidRequestError(message, status=status))


async def _run_until_disconnect(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work`; if the client disconnects, cancel it and raise `ClientDisconnectedError`."""

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, disconnected = asyncio.create_task(work), asyncio.create_task(wait_for_disconnect())
    try:
        await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnectedError("the client disconnected before its answer was complete")
        return task.result()
    finally:
        disconnected.cancel()
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # marks it as seen, if the client disconnected


async def _add(answer: Answer, event: Event) -> list[Object]:
    """Add an event to an answer, in a thread where that may parse a tool call, which can take long."""
    may_parse = isinstance(event, Piece) and answer.choices[event.index].is_in_call
    return await run_in_threadpool(answer.add, event) if may_parse else answer.add(event)
