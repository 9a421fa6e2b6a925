"""Gives each request an id, a log line and metrics, and answers 500 if the service fails."""

import logging
import re
import time
import uuid
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rescue_svc.logs import request_id
from rescue_svc.metrics import Metrics

log = logging.getLogger(__name__)

HEADER = "x-request-id"
_ACCEPTED_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class RequestObserver:
    """ASGI middleware. It keeps a client's X-Request-ID if that is short and plain."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client_id = dict(scope["headers"]).get(HEADER.encode(), b"").decode("latin-1")
        rid = client_id if _ACCEPTED_ID.fullmatch(client_id) else uuid.uuid4().hex
        request_id.set(rid)
        began = time.perf_counter()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (HEADER.encode(), rid.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            log.exception("internal error")
            if not status:
                detail = "internal error; see the log of the service"
                content = {"detail": detail, "code": "internal_error", "request_id": rid}
                await JSONResponse(content, 500)(scope, receive, send_with_id)
        seconds = time.perf_counter() - began
        route: Any = scope.get("route")
        path, method = (route.path, scope["method"]) if route else ("unmatched", "any")
        self._metrics.requests.labels(method, path, status).inc()
        self._metrics.request_seconds.labels(path).observe(seconds)
        log.info("request", extra={"route": f"{method} {path}", "status": status, "ms": round(seconds * 1000, 2)})
