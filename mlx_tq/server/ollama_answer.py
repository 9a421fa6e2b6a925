"""`OllamaAnswer` writes an answer, and `describe` a model, as Ollama's API does: a stream is JSON, line by line."""

import hashlib
import json
import time
from datetime import UTC, datetime
from typing import Any

from mlx_tq.server.answers import Answer, Delta, Object
from mlx_tq.server.api_errors import ApiError
from mlx_tq.server.model_pool import PooledModel

API_VERSION = "0.12.0"  # of Ollama: some clients refuse servers of versions before 0.6.4
_FORMAT = "mlx"
_NS = 1e9
_FOREVER = "9999-12-31T23:59:59Z"  # when a loaded model is unloaded


def error_body(error: ApiError) -> Object:
    return {"error": str(error)}


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def describe(model: PooledModel, created: int) -> Object:
    """Return a model as /api/tags and /api/ps list it."""
    described: Object = {
        "name": model.name,
        "model": model.name,
        "modified_at": _date(created),
        "size": model.nbytes,
        "digest": hashlib.sha256(model.name.encode()).hexdigest(),  # clients tell models apart by it
        "details": {
            "parent_model": "",
            "format": _FORMAT,
            "family": _FORMAT,
            "families": [_FORMAT],
            "parameter_size": "",
            "quantization_level": "",
        },
    }
    if model.service is not None:
        described |= {"size_vram": model.nbytes, "expires_at": _FOREVER, "context_length": model.positions}
    return described


def show(model: PooledModel, created: int, capabilities: list[str]) -> Object:
    """Return a model as /api/show does."""
    described = describe(model, created)
    length = {} if model.positions is None else {f"{_FORMAT}.context_length": model.positions}
    return {
        **{name: described[name] for name in ("modified_at", "details")},
        "model_info": {"general.architecture": _FORMAT, "general.basename": model.name, **length},
        "capabilities": capabilities,
        **dict.fromkeys(("template", "parameters", "modelfile", "license"), ""),
    }


def load_body(model: str, *, is_chat: bool) -> Object:
    """Return the answer to a request that only loads the model."""
    text: Object = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    return {"model": model, "created_at": _date(time.time()), **text, "done": True, "done_reason": "load"}


class OllamaAnswer(Answer):
    stream_end = ""
    media_type = "application/x-ndjson"
    comments_progress = False

    def __init__(self, *args: Any, model: str, is_chat: bool) -> None:
        super().__init__(*args, is_chat=is_chat)
        self._model, self._started = model, time.perf_counter()

    def event_text(self, event: Object) -> str:
        return json.dumps(event) + "\n"

    def start_events(self) -> list[Object]:
        return []

    def _stream(self, index: int, delta: Delta, logprobs: list[Object]) -> list[Object]:
        if not delta.to_dict() and not logprobs:
            return []
        return [{**self._object_of(delta, logprobs), "done": False}]

    def end_events(self, *, usage: bool) -> list[Object]:
        return [{**self._object_of(Delta(), []), **self._end()}]

    def error_event(self, error: ApiError) -> Object:
        return error_body(error)

    def body(self) -> Object:
        choice = self.choices[0]
        return {**self._object_of(choice.message, choice.logprobs), **self._end()}

    def _object_of(self, delta: Delta, logprobs: list[Object]) -> Object:
        thinking = {"thinking": delta.reasoning} if delta.reasoning else {}
        fields: Object = {"model": self._model, "created_at": _date(time.time())}
        if self._is_chat:
            calls = [_call(call) for call in delta.tool_calls]
            message = {"role": "assistant", "content": delta.content, **thinking}
            fields["message"] = {**message, **({"tool_calls": calls} if calls else {})}
        else:
            fields |= {"response": delta.content, **thinking}
        return {**fields, **({"logprobs": logprobs} if logprobs else {})}

    def _end(self) -> Object:
        """Return the final event's fields: the reason, token counts, and durations in nanoseconds."""
        finish_reason, now = self.choices[0].finish_reason, time.perf_counter()
        first, last = self.first_token_at or now, self.last_token_at or now
        return {
            "done": True,
            "done_reason": "length" if finish_reason == "length" else "stop",
            "total_duration": int(_NS * (now - self._started)),
            "load_duration": 0,
            "prompt_eval_count": self.prompt_tokens,
            "prompt_eval_duration": int(_NS * (first - self._started)),
            "eval_count": self.completion_tokens,
            "eval_duration": int(_NS * (last - first)),
            **self.choices[0].recall,
        }


def _call(call: Object) -> Object:
    function = call["function"]
    arguments = json.loads(function["arguments"])
    return {"id": call["id"], "function": {"index": call["index"], "name": function["name"], "arguments": arguments}}
