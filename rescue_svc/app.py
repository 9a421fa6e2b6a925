"""The FastAPI application: routes, gate and error responses."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from rescue_svc import __version__, errors
from rescue_svc.guard import Gate
from rescue_svc.logs import request_id
from rescue_svc.middleware import RequestObserver
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
    # No docs pages: they load scripts from other sites. The OpenAPI document is a route behind the token.
    app = FastAPI(title="mlx-tq rescue", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service = service
    app.state.gate = Gate(service.settings)
    app.include_router(public)
    app.include_router(private, dependencies=[DOCUMENTED_TOKEN] if service.settings.token else [])
    app.add_exception_handler(errors.RescueServiceError, _handle_service_error)
    app.add_exception_handler(RequestValidationError, _handle_validation_error)
    app.add_exception_handler(HTTPException, _handle_http_error)
    app.add_exception_handler(ClientDisconnect, _handle_disconnect)
    app.add_middleware(RequestObserver, metrics=service.metrics)
    return app


def _error_response(status: int, code: str, detail: str, headers: dict[str, str] | None = None) -> JSONResponse:
    content = {"detail": detail, "code": code, "request_id": request_id.get()}
    return JSONResponse(content, status, (headers or {}) | HEADERS.get(status, {}))


def _handle_service_error(request: Request, error: Any) -> JSONResponse:
    status = next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 500)
    return _error_response(status, error.code, str(error))


def _handle_validation_error(request: Request, error: Any) -> JSONResponse:
    return _error_response(422, errors.InvalidRequestError.code, format_errors(error.errors()))


def _handle_http_error(request: Request, error: Any) -> JSONResponse:
    code = HTTP_CODES.get(error.status_code, "http_error")
    return _error_response(error.status_code, code, str(error.detail), dict(error.headers or {}))


def _handle_disconnect(request: Request, error: Any) -> JSONResponse:
    return _error_response(400, "client_handle_disconnect", "the client disconnected before its body had arrived")
