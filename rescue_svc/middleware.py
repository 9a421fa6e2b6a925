"""Around every request: an id, a time, a log line, and an answer even to a fault of our own."""

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


class Observed:
    """ASGI middleware. A client's own X-Request-ID is kept if it is short and plain."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request; the logs, metrics and answer never hold what was sent in it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(HEADER.encode(), b"").decode("latin-1")
        rid = given if _ACCEPTED_ID.fullmatch(given) else uuid.uuid4().hex
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
            log.exception("a fault of the service")
            if not status:
                content = {
                    "detail": "a fault of the service; its log says where",
                    "code": "internal_error",
                    "request_id": rid,
                }
                await JSONResponse(content, 500)(scope, receive, send_with_id)
        self._record(scope, status, time.perf_counter() - began)

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        route: Any = scope.get("route")
        path = getattr(route, "path", "unmatched")
        method = scope["method"] if route else "any"
        self._metrics.requests.labels(method, path, status).inc()
        self._metrics.request_seconds.labels(path).observe(seconds)
        log.info("request", extra={"route": f"{method} {path}", "status": status, "ms": round(seconds * 1000, 2)})
