"""Checks of requests: whether a host is this machine, and how large and slow a body may be."""

import asyncio
import ipaddress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from starlette.requests import Request

BODY_TIMEOUT_S = 30.0  # a client that sends slowly must not block others


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def host_name(header: str) -> str:
    """Return the name in a Host header, in lower case and without the port; "" if the header is not valid."""
    try:
        parts = urlsplit(f"//{header}")
    except ValueError:
        return ""
    return (parts.hostname or "") if parts.netloc == header else ""


def check_length(request: "Request", max_bytes: int, too_large: Exception) -> None:
    """Raise `too_large` for a body whose announced length exceeds `max_bytes`."""
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > max_bytes:
        raise too_large


async def read_body(request: "Request", max_bytes: int, *, too_large: Exception, too_slow: Exception) -> bytes:
    """Read a body; raise `too_large` beyond `max_bytes`, and `too_slow` after BODY_TIMEOUT_S."""
    check_length(request, max_bytes, too_large)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError:
        raise too_slow from None
    return bytes(body)
