"""Parse and validate request bodies in a worker thread."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Receive, Scope

from http_limits.json_body import parse_json
from rescue_svc.schemas import MAX_FAULTS

LARGE_BODY = 2**16  # bytes
MAX_NAME = 100  # characters of a name from the request that an error repeats


class ValidatedRequest(Request):
    """A request whose `json()` returns a validated model, which FastAPI uses without validating again."""

    def __init__(self, scope: Scope, receive: Receive, model: type[BaseModel], lock: asyncio.Lock) -> None:
        super().__init__(scope, receive)
        self._model, self._lock = model, lock

    async def json(self) -> BaseModel:
        """Parse and validate the body, raising HTTPException. FastAPI calls this if the content type is JSON."""
        body = await self.body()
        # One at a time: parsing a large body holds the GIL, and several in turn would starve the event loop.
        async with self._lock if len(body) > LARGE_BODY else nullcontext():
            result = await run_in_threadpool(_validate, self._model, body)
        if isinstance(result, str):
            raise HTTPException(422, result)
        return result


def _validate(model: type[BaseModel], body: bytes) -> BaseModel | str:
    """Return the model, or an error message. Not raised: a traceback would keep the parsed body alive."""
    text = body.decode()
    try:
        value = parse_json(text)
    except ValueError as error:
        return f"body: not JSON: {error}"
    try:
        return model.model_validate(value)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
    return format_errors([{"loc": ("body", *fault["loc"]), "msg": fault["msg"]} for fault in faults])


def format_errors(faults: Sequence[Mapping[str, Any]]) -> str:
    """List the location and message of each error, without the value, which may be text of a span."""
    lines = []
    for fault in faults[:MAX_FAULTS]:
        names = (name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}..." for name in map(str, fault["loc"]))
        lines.append(f"{'.'.join(names)}: {fault['msg']}")
    more = f"; and {len(faults) - MAX_FAULTS} more" if len(faults) > MAX_FAULTS else ""
    return "; ".join(lines) + more
