"""The routes: from a request to a job for the engine, and from its events to an answer."""

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

from mlx_tq.server.answers import Answer
from mlx_tq.server.embeddings import EmbeddingRequest, embed
from mlx_tq.server.errors import ApiError, InvalidRequestError, MethodNotAllowedError, NotFoundError, UnavailableError
from mlx_tq.server.guard import Guard
from mlx_tq.server.jobs import Event, Failed, Job, Piece, Progress, Started
from mlx_tq.server.report import server_report, session_report
from mlx_tq.server.response_schemas import ResponseRequest, in_own_names
from mlx_tq.server.responses import ResponseAnswer
from mlx_tq.server.schemas import ChatRequest, CompletionRequest, Kind, parse
from mlx_tq.server.service import DEFAULT_MODEL, Service
from mlx_tq.server.sessions import HEADER, Turn
from mlx_tq.server.web import HEADERS, PAGE

log = logging.getLogger(__name__)

LIMITED = "X-Max-Tokens"  # of the answer, where that is less than what was asked for


class ClientGoneError(ApiError):
    """Nobody reads this answer any more."""

    status, code = 499, "client_gone"


@dataclass(frozen=True)
class Web:
    """What the routes need, and what goes on behind them."""

    service: Service
    guard: Guard
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do it beside; a task that nobody holds may vanish."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task


Result = TypeVar("Result")
Handler = Callable[[Web, Request], Awaitable[Response]]


def create_app(web: Web, origins: list[str]) -> Starlette:
    """The application; it starts the engine, and who calls this ends it."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        web.service.engine.start(asyncio.get_running_loop())
        yield

    def route(path: str, method: str, handler: Handler, *, guarded: bool = True) -> Route:
        async def endpoint(request: Request) -> Response:
            return await _guarded(web, request, path, handler, guarded=guarded)

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
        exception_handlers={HTTPException: _no_route},
    )


async def _guarded(web: Web, request: Request, path: str, handler: Handler, *, guarded: bool) -> Response:
    """Run a handler; whatever it raises becomes an answer in OpenAI's shape."""
    began = time.perf_counter()
    try:
        if guarded:
            web.guard.check(request)
        response = await handler(web, request)
    except ApiError as error:
        response = _error(error)
    except ClientDisconnect:
        response = _error(ClientGoneError("the client left before its request had arrived"))
    except Exception:
        log.exception("a fault of the server")
        response = _error(ApiError("a fault of the server; its log says where"))
    web.service.metrics.requests.labels(path, response.status_code).inc()
    log.info("%s %s %d %.0f ms", request.method, path, response.status_code, 1e3 * (time.perf_counter() - began))
    return response


def _error(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, error.headers)


async def _no_route(request: Request, error: Exception) -> Response:
    """What Starlette itself refuses."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    if status == 405:
        return _error(MethodNotAllowedError(f"{request.method} is not what this route takes"))
    return _error(NotFoundError("there is no such route") if status == 404 else InvalidRequestError(str(error)))


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


def _model_object(service: Service) -> dict[str, Any]:
    return {"id": service.name, "object": "model", "created": service.created, "owned_by": "mlx_tq"}


async def _models(web: Web, request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_model_object(web.service)]})


async def _model(web: Web, request: Request) -> Response:
    web.service.check_model(request.path_params["name"])
    return JSONResponse(_model_object(web.service))


async def _plan(web: Web, request: Request) -> Response:
    return JSONResponse(server_report(web.service))


async def _drop_session(web: Web, request: Request) -> Response:
    sessions = web.service.sessions
    await sessions.drop(request.path_params["name"])
    await run_in_threadpool(sessions.forget)
    return Response(status_code=204)


async def _page(web: Web, request: Request) -> Response:
    return HTMLResponse(PAGE, headers=HEADERS)


async def _parse_body(web: Web, request: Request, kind: type[Kind]) -> Kind:
    body = await web.guard.body(request)
    request.state.nbytes = len(body)
    # One at a time: a large body holds the GIL, and several in turn would leave the event loop no time.
    return await web.service.large_requests.run(len(body), parse, kind, body)


async def _chat(web: Web, request: Request) -> Response:
    return await _answer(web, request, await _parse_body(web, request, ChatRequest))


async def _complete(web: Web, request: Request) -> Response:
    return await _answer(web, request, await _parse_body(web, request, CompletionRequest))


async def _embed(web: Web, request: Request) -> Response:
    asked = await _parse_body(web, request, EmbeddingRequest)
    return JSONResponse(await embed(asked, web.service.rescue, DEFAULT_MODEL))


async def _respond(web: Web, request: Request) -> Response:
    asked = await _parse_body(web, request, ResponseRequest)
    try:
        chat = await run_in_threadpool(asked.chat)
        return await _answer(web, request, chat, lambda answer: ResponseAnswer(answer, asked))
    except InvalidRequestError as error:
        raise in_own_names(error) from error


async def _answer(
    web: Web,
    request: Request,
    asked: ChatRequest | CompletionRequest,
    form: Callable[[Answer], Answer | ResponseAnswer] = lambda answer: answer,
) -> Response:
    """Generate. A stream begins when the job has left the queue, so that all that can be refused has a status.

    Args:
        web: with the service.
        request: as it came.
        asked: what it says.
        form: gives an answer the form of another route.
    """
    service = web.service
    name, grammar = request.headers.get(HEADER), None
    session = None if name is None else await _run_until_disconnect(request, service.sessions.enter(name))
    try:
        if isinstance(asked, ChatRequest):
            grammar = await _run_until_disconnect(request, service.response_formats.compile(asked, _address(request)))
        jobs, answer, turn = await service.prepare_in_thread(asked, request.state.nbytes, session, grammar)
        events = _events(service, jobs)
        service.engine.submit(*jobs)
    except BaseException:
        if session is not None:
            service.sessions.leave(session)
        raise
    settled = None if turn is None else web.spawn(_settle(web, turn, jobs[0], answer))
    least = min(job.max_tokens for job in jobs)
    limited = {LIMITED: str(least)} if least < (asked.answer_tokens or 0) else {}
    watch = asyncio.create_task(_watch(request, jobs[0]))
    try:
        first = await anext(events)
        assert isinstance(first, Started)  # noqa: S101 - tells the type checker
        answer.told(first)
        shown = form(answer)
        if not asked.stream:
            async for event in events:
                answer.told(event)
                if isinstance(event, Piece):
                    shown.add(event, service.tokenizer.decode)
            if settled is not None:
                await asyncio.shield(settled)
            return JSONResponse(shown.whole(), headers=limited)
    except BaseException:
        await events.aclose()
        raise
    finally:
        watch.cancel()
    lines = _lines(shown, answer, events, service, settled, usage=asked.wants_usage)
    return StreamingResponse(lines, media_type="text/event-stream", headers={"Cache-Control": "no-cache", **limited})


async def _settle(web: Web, turn: Turn, job: Job, answer: Answer) -> None:
    """When a session's job has left the engine and its answer was read, the session's next request has its turn."""
    sessions = web.service.sessions
    try:
        left = await job.left.get()
        await job.heard.wait()
        if left.caches is not None and answer.is_complete:
            await run_in_threadpool(sessions.settle, turn, left, answer.message())
            if left.held is not None:
                answer.session = session_report(left, left.held, web.service.positions)
    except Exception:
        log.exception("a session could not go on")  # its next request begins behind the answer before
    finally:
        sessions.leave(turn.kept)
    web.spawn(run_in_threadpool(sessions.forget))


async def _run_until_disconnect(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work`; cancel it if the client disconnects.

    Raises:
        ClientGoneError: it has disconnected.
    """
    task, disconnected = asyncio.create_task(work), asyncio.create_task(_wait_for_disconnect(request))
    try:
        await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError("the client disconnected while its request was being prepared")
        return task.result()
    finally:
        task.cancel()
        disconnected.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _address(request: Request) -> str:
    return request.client.host if request.client else ""


async def _watch(request: Request, job: Job) -> None:
    """Fail the job's events when the client disconnects."""
    await _wait_for_disconnect(request)
    job.events.put_nowait(Failed(ClientGoneError("the client left before its answer was complete")))


async def _events(service: Service, jobs: Sequence[Job]) -> AsyncGenerator[Event]:
    """What becomes of jobs that share their events; whoever stops listening before the end cancels them.

    Raises:
        ApiError: a job failed.
    """
    began, finished, seen, running = time.perf_counter(), False, False, sum(1 + len(job.others) for job in jobs)
    try:
        while not finished:
            event = await jobs[0].events.get()
            if isinstance(event, Failed):
                finished = not isinstance(event.error, ClientGoneError)
                raise event.error
            if isinstance(event, Piece):
                if not seen:
                    service.metrics.first_token_seconds.observe(time.perf_counter() - began)
                seen, running = True, running - (event.finish is not None)
                finished = not running
            yield event
    finally:
        for job in jobs:
            job.heard.set()
            service.engine.cancel(job)
        if not finished:
            service.metrics.disconnects.inc()


async def _lines(
    shown: Answer | ResponseAnswer,
    answer: Answer,
    events: AsyncGenerator[Event],
    service: Service,
    settled: asyncio.Task[None] | None,
    *,
    usage: bool,
) -> AsyncIterator[str]:
    """Server-sent events: comments while the prompt is read, chunks, and OpenAI's last line."""
    try:
        for each in shown.opening():
            yield _line(each)
        async for event in events:
            answer.told(event)
            if isinstance(event, Progress):
                yield f": {event.done} of {event.total} tokens read\n\n"
            elif isinstance(event, Piece):
                for each in shown.add(event, service.tokenizer.decode):
                    yield _line(each)
        if settled is not None:
            await asyncio.shield(settled)
        for each in shown.closing(usage=usage):
            yield _line(each)
        yield shown.done
    except ApiError as error:
        yield _line(shown.failed(error))
    finally:
        await events.aclose()


def _line(value: dict[str, Any]) -> str:
    name = f"event: {value['type']}\n" if "type" in value else ""
    return f"{name}data: {json.dumps(value)}\n\n"
