"""The calls of the API. Sync functions: FastAPI runs them on threads, as SQLite and FAISS block."""

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool

from rescue_svc import __version__
from rescue_svc.errors import InvalidRequestError
from rescue_svc.guard import PrivateRoute, PublicRoute
from rescue_svc.schemas import (
    MAX_CHUNKS,
    MAX_POSITION,
    DumpAnswer,
    EmbedAnswer,
    EmbedRequest,
    ForgetAnswer,
    FoundChunk,
    HealthAnswer,
    ReadyAnswer,
    ResidenceAnswer,
    RetrieveAnswer,
    RetrieveRequest,
    SessionId,
    SessionInfo,
    SessionList,
    ShownSpan,
    SpansAnswer,
    WriteAnswer,
    WriteRequest,
    error_responses,
)
from rescue_svc.service import RescueService
from rescue_svc.store import NewSpan
from rescue_svc.web import PAGE, POLICY

# The gate does the checking; this tells the OpenAPI document, and so the clients made from it, that there is a token.
DOCUMENTED_TOKEN = Depends(HTTPBearer(auto_error=False, description="the service's RESCUE_TOKEN"))

public = APIRouter(route_class=PublicRoute, responses=error_responses(403))
# Any of these may answer: no token, refused origin, body too slow or too large, too many at once, store out of reach.
private = APIRouter(route_class=PrivateRoute, responses=error_responses(401, 403, 408, 413, 429, 503))


async def the_service(request: Request) -> RescueService:
    """Return the service of the app that is asked. Async: FastAPI runs what is not on another thread."""
    service: RescueService = request.app.state.service
    return service


Service = Annotated[RescueService, Depends(the_service)]
SessionInPath = Annotated[SessionId, Path()]
SessionInQuery = Annotated[SessionId | None, Query(description="the paper's dialect names the session here")]


def one_session(in_query: str | None, in_body: str | None) -> str:
    """Return the session named in the query string or the body; raise InvalidRequestError for none, or for two."""
    named = {in_query, in_body} - {None}
    if len(named) != 1:
        said = "two different sessions are named" if named else "no session is named"
        raise InvalidRequestError(f"session_id: {said}; give it in the body or in the query string")
    return str(named.pop())


@private.post("/evict/write", status_code=201, responses=error_responses(400, 422, 507))
def write(body: WriteRequest, service: Service, session_id: SessionInQuery = None) -> WriteAnswer:
    """Keep evicted spans. The answer is sent when they are committed; the same range and text count once."""
    spans = [NewSpan(chunk.start, chunk.stop, chunk.layer, chunk.score, chunk.text) for chunk in body.chunks]
    accepted, total = service.write(one_session(session_id, body.session_id), spans)
    return WriteAnswer(accepted=accepted, session_total=total)


@private.post("/evict/retrieve", responses=error_responses(400, 422))
async def retrieve(body: RetrieveRequest, service: Service, session_id: SessionInQuery = None) -> RetrieveAnswer:
    """Find the spans that a question needs. Without an embedder BM25 answers alone, and `degraded` says so."""
    # Of a sync function FastAPI would also check the answer on another thread.
    found = await run_in_threadpool(service.retrieve, one_session(session_id, body.session_id), body)
    chunks = [
        FoundChunk(
            text=stretch.span.text,
            token_range=[stretch.span.start, stretch.span.stop],
            layer=stretch.span.layer,
            score=stretch.span.score,
            similarity=stretch.similarity,
            dense=stretch.dense,
            bm25=stretch.bm25,
        )
        for stretch in found.chunks
    ]
    return RetrieveAnswer(chunks=chunks, session_total=found.session_total, mode=found.mode, degraded=found.degraded)


@private.post("/embed", responses=error_responses(400, 422, 424))
def embed(body: EmbedRequest, service: Service) -> EmbedAnswer:
    """Give the vectors of texts, of which nothing is kept. Without an embedder there are none."""
    model, vectors = service.embed(body.texts)
    return EmbedAnswer(model=model, vectors=vectors.tolist())


@private.get("/evict/dump", responses=error_responses(422))
def dump(service: Service, session_id: Annotated[SessionId, Query()]) -> DumpAnswer:
    """Show where a session's spans stood; of a session that was never written, nothing."""
    spans = service.dump(session_id)
    return DumpAnswer(
        session_id=session_id,
        session_total=len(spans),
        token_ranges=[[span.start, span.stop] for span in spans],
        layers=[span.layer for span in spans],
        scores=[span.score for span in spans],
    )


@private.get("/sessions")
def sessions(service: Service) -> SessionList:
    """List all sessions, the last written first."""
    return SessionList(
        sessions=[
            SessionInfo(
                session_id=state.session.name,
                session_total=state.session.spans,
                embedded=state.embedded,
                text_bytes=state.session.text_bytes,
                created=state.session.created,
                updated=state.session.updated,
                resident=state.resident,
            )
            for state in service.sessions()
        ]
    )


@private.delete("/sessions/{session_id}", responses=error_responses(404, 422, 507))
def forget(session_id: SessionInPath, service: Service) -> ForgetAnswer:
    """Forget a session for good: its text is overwritten on disk before the answer is sent."""
    return ForgetAnswer(session_id=session_id, forgotten=service.forget(session_id))


@private.get("/sessions/{session_id}/spans", responses=error_responses(404, 422))
def spans(
    session_id: SessionInPath,
    service: Service,
    first: Annotated[int, Query(ge=0, le=MAX_POSITION)] = 0,
    count: Annotated[int, Query(ge=1, le=MAX_CHUNKS)] = 20,
) -> SpansAnswer:
    """Show some of a session's spans, in the order of writing."""
    found, total = service.page(session_id, first, count)
    shown = [ShownSpan(text=s.text, token_range=[s.start, s.stop], layer=s.layer, score=s.score) for s in found]
    return SpansAnswer(session_id=session_id, session_total=total, first=first, spans=shown)


@private.post("/sessions/{session_id}/hibernate", responses=error_responses(404, 422))
def hibernate(session_id: SessionInPath, service: Service) -> ResidenceAnswer:
    """Let a session's index leave memory. The next question brings it back."""
    return ResidenceAnswer(session_id=session_id, resident=False, vectors=service.hibernate(session_id))


@private.post("/sessions/{session_id}/resume", responses=error_responses(404, 422))
def resume(session_id: SessionInPath, service: Service) -> ResidenceAnswer:
    """Bring a session's index to memory ahead of a question."""
    resident, vectors = service.resume(session_id)
    return ResidenceAnswer(session_id=session_id, resident=resident, vectors=vectors)


@public.get("/healthz")
async def healthz() -> HealthAnswer:
    """Say that the process answers. Open to all, as probes carry no token, and before any queue."""
    return HealthAnswer(version=__version__)


@private.get("/livez")
def livez() -> HealthAnswer:
    """Say that the process answers."""
    return HealthAnswer(version=__version__)


@private.get("/readyz")
def readyz(service: Service) -> ReadyAnswer:
    """Say that the store answers, and whether retrieval is hybrid now or BM25 alone, and why."""
    embedder = service.embedder_info()
    kept = service.store.sessions()
    return ReadyAnswer(
        retrieval="hybrid" if embedder.state == "ready" else "bm25",
        embedder=embedder,
        index=service.index,
        sessions=len(kept),
        spans=sum(session.spans for session in kept),
    )


@private.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
def metrics(service: Service) -> Response:
    """Counters and histograms in Prometheus' text format."""
    service.refresh_gauges()
    return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)


@private.get("/openapi.json", include_in_schema=False)
def openapi(request: Request) -> JSONResponse:
    """Return this API's own description."""
    return JSONResponse(request.app.openapi())


@private.get("/", response_class=Response, responses={200: {"content": {"text/html": {}}}})
def page() -> Response:
    """Show the sessions, their spans and a search box in a browser."""
    return HTMLResponse(PAGE, headers={"Content-Security-Policy": POLICY, "Cache-Control": "no-store"})
