"""Checks of origin, token, load and body size, after routing and before the body is read.

They are part of the route: a middleware would read the path itself, and the router may read it differently
(CVE-2026-48710 in starlette).
"""

import asyncio
import base64
import binascii
import secrets
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from http_limits.request_checks import BODY_TIMEOUT_S, Uploads, host_name, is_loopback, read_body
from rescue_svc.errors import BodyTooLargeError, BodyTooSlowError, BusyError, ForeignOriginError, UnauthorizedError
from rescue_svc.settings import Settings
from rescue_svc.validation import ValidatedRequest

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class Gate:
    """The checks, and the number of requests in progress. Used on the event loop's thread only."""

    def __init__(self, settings: Settings) -> None:
        self._token = settings.token.get_secret_value().encode() if settings.token else None
        self._hosts = {name.lower() for name in (settings.host, *settings.allowed_hosts)} - {""}
        self._max_body = settings.max_body_bytes
        self._max_in_flight = settings.max_in_flight
        self._in_flight = 0  # requests whose body has arrived: slow clients block no one
        self._uploads = Uploads(settings.max_in_flight)
        self._validation = asyncio.Lock()

    def check_origin(self, request: Request) -> None:
        """Refuse pages of other sites, because browsers reach localhost (CSRF, DNS rebinding)."""
        host = request.headers.get("host", "")
        name = host_name(host)
        if not (is_loopback(name) or name in self._hosts):
            raise ForeignOriginError(
                f"Host {name!r} is not this service; call it by its address or set RESCUE_ALLOWED_HOSTS"
            )
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            raise ForeignOriginError(
                f"the request is from a page of {origin!r}; only the page of this service may call it"
            )

    def check_token(self, request: Request) -> None:
        """Require the token as Bearer, or as the password of Basic, which browsers can send."""
        if self._token is None:
            return
        scheme, _, value = request.headers.get("authorization", "").partition(" ")
        token = value.strip().encode()
        if scheme.lower() == "basic":
            try:
                token = base64.b64decode(token, validate=True).partition(b":")[2]
            except binascii.Error:
                token = b""
        elif scheme.lower() != "bearer":
            token = b""
        if not secrets.compare_digest(token, self._token):
            raise UnauthorizedError(
                "a token is required: send `Authorization: Bearer TOKEN` with the service's RESCUE_TOKEN"
            )

    async def admit(self, request: Request, handler: Handler, model: type[BaseModel] | None) -> Response:
        """Run the handler unless too many run. `model` is None if the route has no body."""
        slowest = f"or was the slowest of {self._max_in_flight} that arrived"
        body = await read_body(
            request,
            self._max_body,
            too_large=BodyTooLargeError(f"the body is over {self._max_body} bytes; send fewer chunks a call"),
            too_slow=BodyTooSlowError(
                f"the body took longer than {BODY_TIMEOUT_S} s, {slowest}; send it without pauses"
            ),
            uploads=self._uploads,
        )
        if self._in_flight >= self._max_in_flight:
            raise BusyError(f"{self._max_in_flight} requests are in progress, the limit; try again in a second")
        self._in_flight += 1
        try:

            async def replay() -> Message:
                return {"type": "http.request", "body": body, "more_body": False}

            if model is None:
                return await handler(Request(request.scope, replay))
            return await handler(ValidatedRequest(request.scope, replay, model, self._validation))
        finally:
            self._in_flight -= 1


class PublicRoute(APIRoute):
    needs_token = False

    def get_route_handler(self) -> Handler:
        handler = super().get_route_handler()
        model: Any = self.body_field and self.body_field.field_info.annotation

        async def guarded(request: Request) -> Response:
            gate: Gate = request.app.state.gate
            gate.check_origin(request)
            if not self.needs_token:
                return await handler(request)
            gate.check_token(request)
            return await gate.admit(request, handler, model)

        return guarded


class PrivateRoute(PublicRoute):
    needs_token = True
