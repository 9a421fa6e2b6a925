"""The FastAPI application: routes, gate, and how an error becomes an answer."""

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from rescue_svc import __version__, errors
from rescue_svc.guard import Gate
from rescue_svc.logs import request_id
from rescue_svc.middleware import Observed
from rescue_svc.routes import DOCUMENTED_TOKEN, private, public
from rescue_svc.service import RescueService
from rescue_svc.validation import format_errors

STATUS: dict[type[errors.RescueServiceError], int] = {
    errors.InvalidRequestError: 422,
    errors.UnauthorizedError: 401,
    errors.ForeignOriginError: 403,
    errors.SessionNotFoundError: 404,
    errors.BodyTooLargeError: 413,
    errors.BodyTooSlowError: 408,
    errors.SessionFullError: 413,
    errors.BusyError: 429,
    errors.StoreFullError: 507,
    errors.StoreUnavailableError: 503,
    errors.EmbedderUnavailableError: 424,
    errors.StoreDamagedError: 503,
}
HEADERS = {401: {"WWW-Authenticate": 'Basic realm="mlx-tq-rescue"'}, 429: {"Retry-After": "1"}}
HTTP_CODES = {
    400: "invalid_body",
    404: "no_such_route",
    405: "method_not_allowed",
    422: errors.InvalidRequestError.code,
}


def create_app(service: RescueService) -> FastAPI:
    """Return the application that answers for `service`; who calls this also closes the service."""
    # No docs pages: they load scripts from elsewhere. The document itself is a route of ours, behind the token.
    app = FastAPI(title="mlx-tq rescue", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service = service
    app.state.gate = Gate(service.settings)
    app.include_router(public)
    app.include_router(private, dependencies=[DOCUMENTED_TOKEN] if service.settings.token else [])
    app.add_exception_handler(errors.RescueServiceError, _own_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_middleware(Observed, metrics=service.metrics)
    return app


def _answer(status: int, code: str, detail: str, headers: dict[str, str] | None = None) -> JSONResponse:
    content = {"detail": detail, "code": code, "request_id": request_id.get()}
    return JSONResponse(content, status, (headers or {}) | HEADERS.get(status, {}))


def _own_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, errors.RescueServiceError)  # noqa: S101 - tells the type checker
    status = next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 500)
    return _answer(status, error.code, str(error))


def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)  # noqa: S101 - tells the type checker
    return _answer(422, errors.InvalidRequestError.code, format_errors(error.errors()))


def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)  # noqa: S101 - tells the type checker
    code = HTTP_CODES.get(error.status_code, "http_error")
    return _answer(error.status_code, code, str(error.detail), dict(error.headers or {}))


def _gone(request: Request, error: Exception) -> JSONResponse:
    return _answer(400, "client_gone", "the client went away before its body had arrived")
