"""Errors that a client is told about, in the shape that OpenAI's clients read."""

from typing import Any


class ApiError(Exception):
    """Base: an answer other than 2xx.

    Attributes:
        status: of HTTP.
        kind, code: OpenAI's `type` and `code`.
        param: the argument at fault, if it is one.
        headers: to send along.
    """

    status = 500
    kind = "server_error"
    code = "internal_error"
    headers: dict[str, str] = {}  # noqa: RUF012 - never changed

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def body(self) -> dict[str, Any]:
        """The error as the JSON object that OpenAI's clients read."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


class InvalidRequestError(ApiError):
    """An argument that cannot be met."""

    status, kind, code = 400, "invalid_request_error", "invalid_value"


class ContextLengthError(InvalidRequestError):
    """A prompt, or prompt and answer, longer than the model or the memory allows."""

    code = "context_length_exceeded"


class UnauthorizedError(InvalidRequestError):
    """No key, or a wrong one."""

    status, code = 401, "invalid_api_key"
    headers = {"WWW-Authenticate": "Bearer"}  # noqa: RUF012 - never changed


class ForeignOriginError(InvalidRequestError):
    """A web page, or a name of this machine, that the server does not serve."""

    status, code = 403, "origin_not_allowed"


class NotFoundError(InvalidRequestError):
    """No such route."""

    status, code = 404, "not_found"


class ModelNotFoundError(InvalidRequestError):
    """A model other than the one that is served."""

    status, code = 404, "model_not_found"


class MethodNotAllowedError(InvalidRequestError):
    """A route that does not take this method."""

    status, code = 405, "method_not_allowed"


class BodyTooSlowError(InvalidRequestError):
    """A body that did not arrive in time."""

    status, code = 408, "body_timeout"


class BodyTooLargeError(InvalidRequestError):
    """A body over the limit."""

    status, code = 413, "body_too_large"


class QueueFullError(ApiError):
    """As many requests wait as may."""

    status, kind, code = 429, "rate_limit_error", "queue_full"
    headers = {"Retry-After": "1"}  # noqa: RUF012 - never changed


class UnavailableError(ApiError):
    """The server is stopping, or its engine has ended."""

    status, code = 503, "unavailable"
    headers = {"Retry-After": "5"}  # noqa: RUF012 - never changed


class ModelFailedError(ApiError):
    """The model, or its cache, failed while it ran."""

    code = "model_error"
