"""The FastAPI application: routes, gate and error responses."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from rescue_svc import __version__
from rescue_svc.errors import InvalidRequestError, RescueServiceError
from rescue_svc.guard import Gate
from rescue_svc.logs import request_id
from rescue_svc.middleware import RequestObserver
from rescue_svc.routes import DOCUMENTED_TOKEN, private, public
from rescue_svc.service import RescueService
from rescue_svc.validation import format_errors

HEADERS = {
    401: {"WWW-Authenticate": 'Basic realm="mlx-tq-rescue"'},
    429: {"Retry-After": "1"},
    503: {"Retry-After": "5"},
}
HTTP_CODES = {400: "invalid_body", 404: "no_such_route", 405: "method_not_allowed", 422: InvalidRequestError.code}


def create_app(service: RescueService) -> FastAPI:
    # No docs pages: they load scripts from other sites. The OpenAPI document is a route behind the token.
    off: dict[str, Any] = {"docs_url": None, "redoc_url": None, "openapi_url": None}
    # No redirects: they would go to the host that the request names, before that is checked.
    app = FastAPI(title="mlx-tq rescue", version=__version__, redirect_slashes=False, **off)
    app.state.service = service
    app.state.gate = Gate(service.settings)
    app.include_router(public)
    app.include_router(private, dependencies=[DOCUMENTED_TOKEN] if service.settings.token else [])
    for kind in (RescueServiceError, RequestValidationError, HTTPException, ClientDisconnect):
        app.add_exception_handler(kind, _error_response)
    app.add_middleware(RequestObserver, metrics=service.metrics)
    return app


def _error_response(request: Request, error: Any) -> JSONResponse:
    headers = {}
    match error:
        case RescueServiceError():
            status, code, detail = error.status, error.code, str(error)
        case RequestValidationError():
            status, code, detail = 422, InvalidRequestError.code, format_errors(error.errors())
        case HTTPException():
            status, code, detail = error.status_code, HTTP_CODES.get(error.status_code, "http_error"), error.detail
            headers = dict(error.headers or {})
        case _:
            status, code, detail = 400, "client_disconnected", "the client disconnected before its body had arrived"
    content = {"detail": detail, "code": code, "request_id": request_id.get()}
    return JSONResponse(content, status, headers | HEADERS.get(status, {}))
