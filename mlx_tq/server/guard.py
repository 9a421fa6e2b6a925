"""Who may call, and how much they may send."""

import asyncio
import ipaddress
import secrets
from urllib.parse import urlsplit

from starlette.requests import Request

from mlx_tq.server.errors import (
    BodyTooLargeError,
    BodyTooSlowError,
    ForeignOriginError,
    QueueFullError,
    UnauthorizedError,
)

_MAX_BODY = 10**7  # if the model states no context length
_MIN_DEFAULT_MAX_BODY = 2 * 10**6  # room for tools, schemas and several prompts
_BODY_BYTES_PER_POSITION = 32  # a token is about four bytes, and JSON escapes take up to six per byte
BODY_TIMEOUT_S = 30.0  # a client that trickles its body must not keep a connection for long


def is_loopback(host: str) -> bool:
    """Tell whether `host` is an address that only this machine can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def default_max_body(positions: int | None) -> int:
    """Return the default `--max-body` for a context length (None: unknown)."""
    return _MAX_BODY if positions is None else max(_MIN_DEFAULT_MAX_BODY, _BODY_BYTES_PER_POSITION * positions)


class Guard:
    """The checks before a body is parsed.

    Args:
        key: that clients have to send, or None on a loopback address.
        origins: of web pages that may call.
        max_body: bytes.
        max_bodies: that may arrive at once.
    """

    def __init__(self, key: str | None, origins: list[str], max_body: int, max_bodies: int) -> None:
        self._key = key.encode() if key else None
        self._origins = set(origins)
        self._max_body, self._max_bodies = max_body, max_bodies
        self._arriving = 0

    def check(self, request: Request) -> None:
        """Raise unless the caller may use the models.

        Raises:
            ForeignOriginError: a web page that is neither the server's own nor allowed, or without a key a foreign name
                of this machine: pages reach localhost through the user's browser (CSRF, DNS rebinding).
            UnauthorizedError: no key, or a wrong one.
        """
        origin, host = request.headers.get("origin"), request.headers.get("host", "")
        if origin is not None and origin not in self._origins and not (host and origin.partition("://")[2] == host):
            raise ForeignOriginError("web pages may not call this server; start it with --allowed-origins to let one")
        if self._key is None:
            name = urlsplit(f"//{host}").hostname or ""
            if not is_loopback(name):
                raise ForeignOriginError("without an API key the server answers to localhost alone; call it by that")
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secrets.compare_digest(given.strip().encode(), self._key):
            raise UnauthorizedError("the API key is missing or wrong; send `Authorization: Bearer KEY`")

    async def body(self, request: Request) -> bytes:
        """The body, read up to the limit.

        Raises:
            BodyTooLargeError, BodyTooSlowError: it is.
            QueueFullError: as many bodies as may are on their way.
            ClientDisconnect: the client left before it had arrived.
        """
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > self._max_body:
            raise self._too_large()
        if self._arriving >= self._max_bodies:
            raise QueueFullError(f"{self._max_bodies} requests are arriving, the limit; try again in a second")
        body = bytearray()
        self._arriving += 1
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for part in request.stream():
                    body += part
                    if len(body) > self._max_body:
                        raise self._too_large()
        except TimeoutError:
            raise BodyTooSlowError(f"the body took longer than {BODY_TIMEOUT_S:.0f} s to arrive") from None
        finally:
            self._arriving -= 1
        return bytes(body)

    def _too_large(self) -> BodyTooLargeError:
        return BodyTooLargeError(f"the body is over {self._max_body} bytes; shorten it, or raise --max-body")
