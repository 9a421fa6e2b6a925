"""The routes of the API. Sync functions run on threads of FastAPI, because SQLite and FAISS block."""

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool

from rescue_svc import __version__, schemas
from rescue_svc.errors import InvalidRequestError
from rescue_svc.guard import PrivateRoute, PublicRoute
from rescue_svc.service import RescueService
from rescue_svc.store import NewSpan
from rescue_svc.web import PAGE, POLICY

# For the OpenAPI document only; the gate checks the token.
DOCUMENTED_TOKEN = Depends(HTTPBearer(auto_error=False, description="the service's RESCUE_TOKEN"))

public = APIRouter(route_class=PublicRoute, responses=schemas.error_responses(403))
# No token, refused origin, slow or large body, too many requests, store unavailable.
private = APIRouter(route_class=PrivateRoute, responses=schemas.error_responses(401, 403, 408, 413, 429, 503))


async def get_service(request: Request) -> RescueService:
    """Return the service of the app. FastAPI would run a sync function on another thread."""
    service: RescueService = request.app.state.service
    return service


Service = Annotated[RescueService, Depends(get_service)]
SessionInPath = Annotated[schemas.SessionId, Path()]
SessionInQuery = Annotated[schemas.SessionId | None, Query(description="an alternative to session_id in the body")]


def session_name(in_query: str | None, in_body: str | None) -> str:
    """Return the session named in the query string or the body; raise InvalidRequestError for none, or for two."""
    names = {in_query, in_body} - {None}
    if len(names) != 1:
        fault = "two different sessions are named" if names else "no session is named"
        raise InvalidRequestError(f"session_id: {fault}; give it in the body or in the query string")
    return str(names.pop())


@private.post("/evict/write", status_code=201, responses=schemas.error_responses(400, 422, 507))
def write(body: schemas.WriteRequest, service: Service, session_id: SessionInQuery = None) -> schemas.WriteResponse:
    """Store evicted spans. The response is sent when they are committed; equal range and text count once."""
    spans = [NewSpan(chunk.start, chunk.stop, chunk.layer, chunk.score, chunk.text) for chunk in body.chunks]
    accepted, total = service.write(session_name(session_id, body.session_id), spans, temporary=body.temporary)
    return schemas.WriteResponse(accepted=accepted, session_total=total)


@private.post("/evict/retrieve", responses=schemas.error_responses(400, 422))
async def retrieve(
    body: schemas.RetrieveRequest, service: Service, session_id: SessionInQuery = None
) -> schemas.RetrieveResponse:
    """Retrieve the spans that match a query. Without an embedder it searches keywords only; `degraded` says why."""
    # For a sync function FastAPI would validate the response on another thread, too.
    return await run_in_threadpool(service.retrieve, session_name(session_id, body.session_id), body)


@private.post("/embed", responses=schemas.error_responses(400, 422, 424))
def embed(body: schemas.EmbedRequest, service: Service) -> schemas.EmbedResponse:
    """Return the vectors of texts, which are not stored. This requires an embedder."""
    model, vectors = service.embed(body.texts)
    return schemas.EmbedResponse(model=model, vectors=vectors.tolist())


@private.get("/evict/dump", responses=schemas.error_responses(422))
def dump(service: Service, session_id: Annotated[schemas.SessionId, Query()]) -> schemas.DumpResponse:
    """Return the positions of a session's spans; none for a session that was never written."""
    session = service.store.session(session_id)
    spans = service.store.spans(session) if session else []
    return schemas.DumpResponse(
        session_id=session_id,
        session_total=len(spans),
        token_ranges=[[span.start, span.stop] for span in spans],
        layers=[span.layer for span in spans],
        scores=[span.score for span in spans],
    )


@private.get("/sessions")
def sessions(service: Service) -> schemas.SessionsResponse:
    """List all sessions, the most recently written first."""
    infos = [
        schemas.SessionInfo(
            session_id=session.name,
            session_total=session.spans,
            embedded=service.store.count_vectors(session.id, service.embedder.model) if service.embedder else 0,
            text_bytes=session.text_bytes,
            created=session.created,
            updated=session.updated,
            expires=session.expires,
            resident=service.index.is_resident(session.id),
        )
        for session in service.store.sessions()
    ]
    return schemas.SessionsResponse(sessions=infos)


@private.delete("/sessions/{session_id}", responses=schemas.error_responses(404, 422, 507))
def forget(session_id: SessionInPath, service: Service) -> schemas.ForgetResponse:
    """Delete a session for good. Its text is overwritten on disk before the response is sent."""
    return schemas.ForgetResponse(session_id=session_id, forgotten=service.forget(session_id))


@private.post("/sessions/{session_id}/renew", responses=schemas.error_responses(404, 422, 507))
def renew(session_id: SessionInPath, service: Service) -> schemas.RenewResponse:
    """Extend the lifetime of a temporary session: `session_lifetime_s` from now."""
    return schemas.RenewResponse(session_id=session_id, expires=service.renew(session_id))


@private.get("/sessions/{session_id}/spans", responses=schemas.error_responses(404, 422))
def list_spans(
    session_id: SessionInPath,
    service: Service,
    first: Annotated[int, Query(ge=0, le=schemas.MAX_POSITION)] = 0,
    count: Annotated[int, Query(ge=1, le=schemas.MAX_CHUNKS)] = 20,
) -> schemas.SpansResponse:
    """Return a page of a session's spans, in the order of writing."""
    session = service.store.existing(session_id)
    page = service.store.page(session, first, count)
    spans = [schemas.StoredSpan(text=s.text, token_range=[s.start, s.stop], layer=s.layer, score=s.score) for s in page]
    return schemas.SpansResponse(session_id=session_id, session_total=session.spans, first=first, spans=spans)


@private.post("/sessions/{session_id}/hibernate", responses=schemas.error_responses(404, 422))
def hibernate(session_id: SessionInPath, service: Service) -> schemas.ResidenceResponse:
    """Remove a session's index from memory. The next query loads it again."""
    vectors = service.index.hibernate(service.store.existing(session_id).id)
    return schemas.ResidenceResponse(session_id=session_id, resident=False, vectors=vectors)


@private.post("/sessions/{session_id}/resume", responses=schemas.error_responses(404, 422))
def resume(session_id: SessionInPath, service: Service) -> schemas.ResidenceResponse:
    """Load a session's index ahead of a query."""
    session = service.store.existing(session_id).id
    vectors = service.index.resume(session) if service.embedder else 0
    resident = service.index.is_resident(session)
    return schemas.ResidenceResponse(session_id=session_id, resident=resident, vectors=vectors)


@public.get("/healthz")
async def healthz() -> schemas.HealthResponse:
    """Report that the process answers. Probes need no token and do not queue."""
    return schemas.HealthResponse(version=__version__)


@private.get("/livez")
def livez() -> schemas.HealthResponse:
    """Report that the process answers."""
    return schemas.HealthResponse(version=__version__)


@private.get("/readyz")
def readyz(service: Service) -> schemas.ReadyResponse:
    """Report that the store answers, and whether retrieval is hybrid or BM25 alone, and why."""
    embedder = service.embedder_info()
    stored = service.store.sessions()
    return schemas.ReadyResponse(
        retrieval="hybrid" if embedder.state == "ready" else "bm25",
        embedder=embedder,
        index=service.index.name,
        sessions=len(stored),
        spans=sum(session.spans for session in stored),
    )


@private.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
def metrics(service: Service) -> Response:
    """Return counters and histograms in the text format of Prometheus."""
    service.refresh_gauges()
    return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)


@private.get("/openapi.json", include_in_schema=False)
def openapi(request: Request) -> JSONResponse:
    """Return the description of this API."""
    return JSONResponse(request.app.openapi())


@private.get("/", response_class=Response, responses={200: {"content": {"text/html": {}}}})
def page() -> Response:
    """Return the web page with sessions, spans and a search box."""
    return HTMLResponse(PAGE, headers={"Content-Security-Policy": POLICY, "Cache-Control": "no-store"})
