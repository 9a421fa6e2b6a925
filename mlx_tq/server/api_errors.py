"""Errors that become HTTP responses, with the JSON body that OpenAI's clients expect."""

from typing import Any

# Codes of invalid requests by status. A context that is too long and an unknown model have codes of their own.
CODES = {
    400: "invalid_value",
    401: "invalid_api_key",
    403: "origin_not_allowed",
    404: "not_found",
    405: "method_not_allowed",
    408: "body_timeout",
    413: "body_too_large",
}
ERROR_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "5"}}


class ApiError(Exception):
    """Base class: an HTTP response with an error status.

    `kind` and `code` are OpenAI's `type` and `code`; `param` is the request argument at fault, or None.
    """

    status, kind, code = 500, "server_error", "internal_error"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


class InvalidRequestError(ApiError):
    status, kind, code = 400, "invalid_request_error", CODES[400]

    def __init__(self, message: str, param: str | None = None, *, status: int | None = None) -> None:
        super().__init__(message, param)
        if status is not None:
            self.status, self.code = status, CODES[status]


class ContextLengthError(InvalidRequestError):
    """The prompt, or prompt and completion together, exceed the context length or the memory.

    `counts` are the tokens of the prompt, and those that it may have, if they are what is wrong; `reason` is a sentence
    with why it may not have more, if that is the memory.
    """

    code = "context_length_exceeded"

    def __init__(
        self, message: str, param: str | None = None, *, counts: tuple[int, int] | None = None, reason: str = ""
    ) -> None:
        super().__init__(message, param)
        self.counts, self.reason = counts, reason

    @classmethod
    def of(
        cls,
        prompt_tokens: int,
        positions: int,
        answer_tokens: int,
        param: str,
        reason: str = "",
        *,
        is_bound: bool = False,
    ) -> "ContextLengthError":
        """Return the error of a prompt that leaves less than `answer_tokens`, in words that clients parse.

        With `is_bound`, the prompt has at least `prompt_tokens`.
        """
        at_least = "at least " if is_bound else ""
        needs = "" if answer_tokens == 1 else f" An answer without max_tokens needs {answer_tokens} more."
        return cls(
            f"This model's maximum context length is {positions} tokens. However, your prompt has {at_least}"
            f"{prompt_tokens} tokens: prompt is too long: {prompt_tokens} tokens > {positions - answer_tokens} maximum."
            f"{needs} Shorten the prompt.{reason}",
            param,
            counts=(prompt_tokens, positions - answer_tokens),
            reason=reason,
        )


class RequiredCallError(InvalidRequestError):
    """Tools that the model can only be made to call, which not every API can ask for; `fault` says why."""

    def __init__(self, fault: str) -> None:
        super().__init__(
            f"{fault}. Use tool_choice 'required' or name a function, remove tools, or start the server with a "
            "--chat-template that supports them",
            "tools",
        )
        self.fault = fault


class ModelNotFoundError(InvalidRequestError):
    status, code = 404, "model_not_found"


class QueueFullError(ApiError):
    status, kind, code = 429, "rate_limit_error", "queue_full"


class ClientDisconnectedError(ApiError):
    """No client receives this response; it appears in logs and metrics only."""

    status, code = 499, "client_disconnected"


class UnavailableError(ApiError):
    status, code = 503, "unavailable"


class ModelFailedError(ApiError):
    code = "model_error"
