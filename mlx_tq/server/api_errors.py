"""Errors that become HTTP responses, with the JSON body that OpenAI's clients expect."""

from typing import Any


class ApiError(Exception):
    """Base class: an HTTP response with an error status.

    `kind` and `code` are OpenAI's `type` and `code`; `param` is the request argument at fault, or None.
    """

    status = 500
    kind = "server_error"
    code = "internal_error"
    headers: dict[str, str] = {}  # noqa: RUF012 - never changed

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


class InvalidRequestError(ApiError):
    status, kind, code = 400, "invalid_request_error", "invalid_value"


class ContextLengthError(InvalidRequestError):
    """The prompt, or prompt and completion together, exceed the context length or the memory."""

    code = "context_length_exceeded"


class UnauthorizedError(InvalidRequestError):
    status, code = 401, "invalid_api_key"
    headers = {"WWW-Authenticate": "Bearer"}  # noqa: RUF012 - never changed


class ForeignOriginError(InvalidRequestError):
    """The request came from a web page, or through a host name, that may not call this server."""

    status, code = 403, "origin_not_allowed"


class NotFoundError(InvalidRequestError):
    status, code = 404, "not_found"


class ModelNotFoundError(InvalidRequestError):
    status, code = 404, "model_not_found"


class MethodNotAllowedError(InvalidRequestError):
    status, code = 405, "method_not_allowed"


class BodyTooSlowError(InvalidRequestError):
    status, code = 408, "body_timeout"


class BodyTooLargeError(InvalidRequestError):
    status, code = 413, "body_too_large"


class QueueFullError(ApiError):
    status, kind, code = 429, "rate_limit_error", "queue_full"
    headers = {"Retry-After": "1"}  # noqa: RUF012 - never changed


class ClientDisconnectedError(ApiError):
    """Nobody receives this response; it appears in logs and metrics only."""

    status, code = 499, "client_disconnected"


class UnavailableError(ApiError):
    status, code = 503, "unavailable"
    headers = {"Retry-After": "5"}  # noqa: RUF012 - never changed


class ModelFailedError(ApiError):
    code = "model_error"
