"""`MessagesAnswer` writes an answer as Anthropic's Messages API does: blocks of thinking, text and tool use."""

import json
import time
import uuid
from typing import Any

from mlx_tq.server.answers import Answer, Delta, Object
from mlx_tq.server.api_errors import ApiError, ContextLengthError
from mlx_tq.server.job import Event, Piece, PrefillProgress

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_DELTAS = {"thinking": "thinking_delta", "text": "text_delta"}
_PING = {"type": "ping"}
_PING_S = 5.0  # clients give up on streams that are silent for long, as while a tool call is generated
_SIGNATURE = "mlx_tq"  # proves nothing, but some clients send back only thinking that has one


def error_body(error: ApiError) -> Object:
    message = str(error)
    if isinstance(error, ContextLengthError):  # clients look for these words, and then compact the conversation
        counted = "{} tokens > {} maximum".format(*error.counts) if error.counts else message
        message = f"prompt is too long: {counted}{error.reason and f'.{error.reason}'}"
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


class MessagesAnswer(Answer):
    stream_end = ""
    comments_progress = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._id = f"msg_{uuid.uuid4().hex}"
        self._blocks: list[Object] = []
        self._open_type: str | None = None  # of the last block, while it grows
        self._space = ""  # before text that has not come; alone, it would be an empty block
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None
        self._events: list[Object] = []  # not yet returned
        self._last_event_at = time.monotonic()

    def add(self, event: Event) -> list[Object]:
        if isinstance(event, Piece):
            self._stop_sequence = event.stop
        events, now = super().add(event), time.monotonic()
        if isinstance(event, PrefillProgress) or (not events and now - self._last_event_at >= _PING_S):
            events = [_PING]
        if events:
            self._last_event_at = now
        return events

    def start_events(self) -> list[Object]:
        return [{"type": "message_start", "message": self.body()}]

    def _stream(self, index: int, delta: Delta, logprobs: list[Object]) -> list[Object]:
        if delta.reasoning:
            self._add_text("thinking", delta.reasoning)
        if delta.content:
            self._space += delta.content
            if self._open_type == "text" or self._space.strip():
                self._add_text("text", self._space)
                self._space = ""
        for call in delta.tool_calls:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            self._open("tool_use", id=call["id"], name=name, input={})
            self._emit_delta("input_json_delta", partial_json=arguments)
            self._blocks[-1]["input"] = json.loads(arguments)
        finish_reason = self.choices[index].finish_reason
        if finish_reason is not None:
            self._close()
            has_stop = finish_reason == "stop" and self._stop_sequence is not None
            self._stop_reason = "stop_sequence" if has_stop else _STOP_REASONS[finish_reason]
        events, self._events = self._events, []
        return events

    def end_events(self, *, usage: bool) -> list[Object]:
        """Return the last events, which always have the usage."""
        body = self.body()
        delta = {name: body[name] for name in ("stop_reason", "stop_sequence")}
        recall = self.choices[0].recall
        return [{"type": "message_delta", "delta": delta, "usage": body["usage"], **recall}, {"type": "message_stop"}]

    def error_event(self, error: ApiError) -> Object:
        return error_body(error)

    def body(self) -> Object:
        prompt, cached = (round(self.usage_scale * tokens) for tokens in (self.prompt_tokens, self.cached_tokens))
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": list(self._blocks),
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": {
                "input_tokens": prompt - cached,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": cached,
                "output_tokens": self.completion_tokens,
            },
            **self.choices[0].recall,
        }

    def _add_text(self, kind: str, text: str) -> None:
        """Add text to the open block; first close that if it is of another type."""
        if self._open_type != kind:
            self._open(kind, **{kind: ""}, **({"signature": ""} if kind == "thinking" else {}))
        self._blocks[-1][kind] += text
        self._emit_delta(_DELTAS[kind], **{kind: text})

    def _open(self, kind: str, **fields: Any) -> None:
        self._close()
        self._open_type = kind
        self._blocks.append({"type": kind, **fields})
        self._emit("content_block_start", content_block=dict(self._blocks[-1]))

    def _close(self) -> None:
        kind, self._open_type = self._open_type, None
        if kind == "thinking":
            self._blocks[-1]["signature"] = _SIGNATURE
            self._emit_delta("signature_delta", signature=_SIGNATURE)
        if kind is not None:
            self._emit("content_block_stop")

    def _emit_delta(self, kind: str, **fields: Any) -> None:
        self._emit("content_block_delta", delta={"type": kind, **fields})

    def _emit(self, kind: str, **fields: Any) -> None:
        self._events.append({"type": kind, "index": len(self._blocks) - 1, **fields})
