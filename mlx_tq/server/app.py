"""The routes: from an HTTP request to jobs for the engine, and from their events to a response."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from mlx_tq.server.answers import Answer, ChunkWriter, Object, ResponseWriter, Writer
from mlx_tq.server.api_errors import (
    ApiError,
    ClientDisconnectedError,
    InvalidRequestError,
    MethodNotAllowedError,
    NotFoundError,
    UnavailableError,
)
from mlx_tq.server.embeddings import embed
from mlx_tq.server.guard import Guard
from mlx_tq.server.job import Event, Failed, Job, Piece, Progress, Started
from mlx_tq.server.model_service import DEFAULT_MODEL, ModelService
from mlx_tq.server.schemas import (
    Body,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    ResponseRequest,
    parse,
    with_response_names,
)
from mlx_tq.server.sessions import HEADER, SessionTurn
from mlx_tq.server.web import HEADERS, PAGE

log = logging.getLogger(__name__)

# Says how many tokens the answer may have, where that is less than the request asks for.
MAX_TOKENS_HEADER = "X-Max-Tokens"


@dataclass(frozen=True)
class Web:
    """The state that the routes share."""

    service: ModelService
    guard: Guard
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` in the background; asyncio may drop a task that nothing refers to."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task


Result = TypeVar("Result")
Handler = Callable[[Web, Request], Awaitable[Response]]


def create_app(web: Web, origins: list[str]) -> Starlette:
    """Return the application. It starts the engine; the caller ends it."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        web.service.engine.start(asyncio.get_running_loop())
        yield

    def route(path: str, method: str, handler: Handler, *, guarded: bool = True) -> Route:
        async def endpoint(request: Request) -> Response:
            return await _handle(web, request, path, handler, guarded=guarded)

        return Route(path, endpoint, methods=[method])

    routes = [
        route("/v1/chat/completions", "POST", _chat),
        route("/v1/completions", "POST", _complete),
        route("/v1/responses", "POST", _respond),
        route("/v1/embeddings", "POST", _embed),
        route("/v1/models", "GET", _models),
        route("/v1/models/{name:path}", "GET", _model),
        route("/v1/plan", "GET", _plan),
        route("/v1/sessions/{name}", "DELETE", _drop_session),
        route("/metrics", "GET", _metrics),
        route("/health", "GET", _health, guarded=False),
        route("/", "GET", _page, guarded=False),
    ]
    methods = ["GET", "POST", "DELETE"]
    cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=methods, allow_headers=["*"])
    return Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[cors] if origins else [],
        exception_handlers={HTTPException: _refused_by_starlette},
    )


async def _handle(web: Web, request: Request, path: str, handler: Handler, *, guarded: bool) -> Response:
    """Run a handler; whatever it raises becomes a response in OpenAI's shape."""
    started = time.perf_counter()
    try:
        if guarded:
            web.guard.check_caller(request)
        response = await handler(web, request)
    except ApiError as error:
        response = _error_response(error)
    except ClientDisconnect:
        response = _error_response(ClientDisconnectedError("the client disconnected while it sent its request"))
    except Exception:
        log.exception("internal error")
        response = _error_response(ApiError("internal error; see the server's log"))
    web.service.metrics.requests.labels(path, response.status_code).inc()
    log.info("%s %s %d %.0f ms", request.method, path, response.status_code, 1e3 * (time.perf_counter() - started))
    return response


def _error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, error.headers)


async def _refused_by_starlette(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    if status == 405:
        return _error_response(MethodNotAllowedError(f"this route does not support {request.method}"))
    return _error_response(NotFoundError("unknown route") if status == 404 else InvalidRequestError(str(error)))


# Routes without generation.


async def _health(web: Web, request: Request) -> Response:
    if not web.service.engine.is_healthy:
        raise UnavailableError("the engine has ended; start the server again")
    if web.service.engine.is_stalled:
        raise UnavailableError(
            "one engine step has taken more than 2 minutes; restart the server, and if the model is just slow, "
            "lower --prefill-step-size"
        )
    return JSONResponse({"status": "ok"})


async def _metrics(web: Web, request: Request) -> Response:
    return Response(generate_latest(web.service.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _model_object(service: ModelService) -> Object:
    return {"id": service.name, "object": "model", "created": service.created, "owned_by": "mlx_tq"}


async def _models(web: Web, request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_model_object(web.service)]})


async def _model(web: Web, request: Request) -> Response:
    web.service.check_model(request.path_params["name"])
    return JSONResponse(_model_object(web.service))


async def _plan(web: Web, request: Request) -> Response:
    return JSONResponse(web.service.report())


async def _drop_session(web: Web, request: Request) -> Response:
    await web.service.sessions.drop(request.path_params["name"])
    await run_in_threadpool(web.service.sessions.forget_dropped)
    return Response(status_code=204)


async def _page(web: Web, request: Request) -> Response:
    return HTMLResponse(PAGE, headers=HEADERS)


async def _embed(web: Web, request: Request) -> Response:
    body = await _parse_body(web, request, EmbeddingRequest)
    return JSONResponse(await embed(body, web.service.rescue, DEFAULT_MODEL))


# Routes with generation.


async def _parse_body(web: Web, request: Request, kind: type[Body]) -> Body:
    content = await web.guard.read_body(request)
    request.state.nbytes = len(content)
    # Parsing a large body holds the GIL; several in turn would block the event loop.
    return await web.service.large_requests.run(len(content), parse, kind, content)


async def _chat(web: Web, request: Request) -> Response:
    return await _generate(web, request, await _parse_body(web, request, ChatRequest), ChunkWriter)


async def _complete(web: Web, request: Request) -> Response:
    return await _generate(web, request, await _parse_body(web, request, CompletionRequest), ChunkWriter)


async def _respond(web: Web, request: Request) -> Response:
    body = await _parse_body(web, request, ResponseRequest)
    try:
        chat = await run_in_threadpool(body.to_chat)
        return await _generate(web, request, chat, lambda answer: ResponseWriter(answer, body))
    except InvalidRequestError as error:
        raise with_response_names(error) from error


async def _generate(
    web: Web, request: Request, body: ChatRequest | CompletionRequest, make_writer: Callable[[Answer], Writer]
) -> Response:
    """Generate the answer. A stream starts when the job has left the queue, so that refusals have an HTTP status."""
    service = web.service
    session_name, grammar, session = request.headers.get(HEADER), None, None
    if session_name is not None:
        session = await _run_until_disconnect(request, service.sessions.enter(session_name))
    try:
        if isinstance(body, ChatRequest):
            client = request.client.host if request.client else ""
            grammar = await _run_until_disconnect(request, service.response_formats.compile(body, client))
        preparation = (service.prepare, body, session, grammar)
        jobs, answer, turn = await service.large_requests.run(request.state.nbytes, *preparation)
        events = _events(service, jobs)
        service.engine.submit(*jobs)
    except BaseException:
        if session is not None:
            service.sessions.leave(session)
        raise
    settled = None if turn is None else web.spawn(_settle(web, turn, jobs[0], answer))
    max_tokens = min(job.max_tokens for job in jobs)
    headers = {MAX_TOKENS_HEADER: str(max_tokens)} if max_tokens < (body.answer_tokens or 0) else {}
    watch = asyncio.create_task(_fail_on_disconnect(request, jobs[0]))
    try:
        first = await anext(events)
        assert isinstance(first, Started)  # noqa: S101 - tells the type checker
        answer.add(first, service.tokenizer.decode)
        writer = make_writer(answer)
        if not body.stream:
            async for event in events:
                if (update := answer.add(event, service.tokenizer.decode)) is not None:
                    writer.events(update)
            if settled is not None:
                await asyncio.shield(settled)
            return JSONResponse(writer.body(), headers=headers)
    except BaseException:
        await events.aclose()
        raise
    finally:
        watch.cancel()
    lines = _stream(writer, answer, events, service, settled, usage=body.wants_usage)
    return StreamingResponse(lines, media_type="text/event-stream", headers={"Cache-Control": "no-cache", **headers})


async def _settle(web: Web, turn: SessionTurn, job: Job, answer: Answer) -> None:
    """End a session's turn when its job has left the engine and its events were read."""
    service = web.service
    try:
        result = await job.session_result.get()
        await job.events_closed.wait()
        if result.caches is not None and answer.is_complete:
            await run_in_threadpool(service.sessions.settle, turn, result, answer.message())
            answer.session = service.session_report(result)
    except Exception:
        log.exception("cannot continue a session")  # its next request continues from the answer before
    finally:
        service.sessions.leave(turn.session)
    web.spawn(run_in_threadpool(service.sessions.forget_dropped))


async def _run_until_disconnect(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work`; cancel it if the client disconnects, and raise `ClientDisconnectedError`."""
    task, disconnected = asyncio.create_task(work), asyncio.create_task(_wait_for_disconnect(request))
    try:
        await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnectedError("the client disconnected while its request was being prepared")
        return task.result()
    finally:
        task.cancel()
        disconnected.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _fail_on_disconnect(request: Request, job: Job) -> None:
    await _wait_for_disconnect(request)
    job.events.put_nowait(Failed(ClientDisconnectedError("the client disconnected before its answer was complete")))


async def _events(service: ModelService, jobs: Sequence[Job]) -> AsyncGenerator[Event]:
    """Yield the events of jobs, which share a queue, and raise their errors. Closing it early cancels the jobs."""
    started, first_token, ended = time.perf_counter(), True, False
    unfinished = sum(len(job.answers) for job in jobs)
    try:
        while not ended:
            event = await jobs[0].events.get()
            if isinstance(event, Failed):
                ended = not isinstance(event.error, ClientDisconnectedError)
                raise event.error
            if isinstance(event, Piece):
                if first_token:
                    service.metrics.first_token_seconds.observe(time.perf_counter() - started)
                first_token, unfinished = False, unfinished - (event.finish_reason is not None)
                ended = not unfinished
            yield event
    finally:
        for job in jobs:
            job.events_closed.set()
            service.engine.cancel(job)
        if not ended:
            service.metrics.disconnects.inc()


async def _stream(
    writer: Writer,
    answer: Answer,
    events: AsyncGenerator[Event],
    service: ModelService,
    settled: asyncio.Task[None] | None,
    *,
    usage: bool,
) -> AsyncIterator[str]:
    """Yield server-sent events; during the prefill, comments with its progress."""
    try:
        for value in writer.start_events():
            yield _sse(value)
        async for event in events:
            if isinstance(event, Progress):
                yield f": prefill {event.done} of {event.total} tokens\n\n"
            if (update := answer.add(event, service.tokenizer.decode)) is not None:
                for value in writer.events(update):
                    yield _sse(value)
        if settled is not None:
            await asyncio.shield(settled)
        for value in writer.end_events(usage=usage):
            yield _sse(value)
        yield writer.end
    except ApiError as error:
        yield _sse(writer.error_event(error))
    finally:
        await events.aclose()


def _sse(value: Object) -> str:
    name = f"event: {value['type']}\n" if "type" in value else ""
    return f"{name}data: {json.dumps(value)}\n\n"
