"""The objects and events of /v1/responses, from the same answer that a chat gets."""

import time
import uuid
from typing import Any

from mlx_tq.server.answers import Answer
from mlx_tq.server.errors import ApiError, InvalidRequestError
from mlx_tq.server.jobs import Piece
from mlx_tq.server.response_schemas import ResponseRequest, in_own_names

Object = dict[str, Any]
_MARKS = {"message": "msg", "reasoning": "rs", "function_call": "fc"}  # how ids of items begin
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


class ResponseAnswer:
    """A response in the making: items of thoughts, text and calls, one after the other.

    Args:
        answer: takes the pieces apart.
        asked: the request, which the response repeats.
    """

    done = ""  # behind the last event

    def __init__(self, answer: Answer, asked: ResponseRequest) -> None:
        self._answer, self._asked = answer, asked
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._items: list[Object] = []
        self._open: Object | None = None  # the last item, while it grows
        self._thoughts = self._events = 0
        self._finish: str | None = None
        self._recalled: Object = {}

    def opening(self) -> list[Object]:
        """The first events of a stream."""
        return [self._event(kind, response=self._response()) for kind in ("created", "in_progress")]

    def add(self, piece: Piece, names: Any) -> list[Object]:
        """The events of a stream for a piece."""
        chunks = self._answer.add(piece, names)
        if not chunks:
            return []
        (choice,) = chunks[0]["choices"]
        delta, shown = choice["delta"], choice.get("logprobs", {}).get("content", [])
        events: list[Object] = []
        if text := delta.get("reasoning"):
            self._thoughts += 1
            events += self._grow("reasoning", text, [])
        if (text := delta.get("content", "")) or (shown and not delta):
            events += self._grow("message", text, shown)
        for call in delta.get("tool_calls", []):
            events += self._call(call)
        self._finish = choice["finish_reason"]
        if "recalled" in choice:
            self._recalled = {"recalled": choice["recalled"]}
        if self._finish is not None:
            if not self._items:
                events += self._grow("message", "", [])
            events += self._close()
        return events

    def closing(self, *, usage: bool) -> list[Object]:
        """The last event of a stream; the counts are always in it."""
        return [self._event("incomplete" if self._finish == "length" else "completed", response=self._response())]

    def failed(self, error: ApiError) -> Object:
        """The event of an error."""
        named = in_own_names(error) if isinstance(error, InvalidRequestError) else error
        return {**named.body()["error"], "type": "error", "sequence_number": self._events}

    def whole(self) -> Object:
        """The response as one object."""
        return self._response()

    # Items.

    def _grow(self, kind: str, text: str, shown: list[Object]) -> list[Object]:
        """Add text to the item that is open, which is closed first where it is of another kind."""
        events = []
        if self._open is None or self._open["type"] != kind:
            events = self._close()
            part: Object = {"type": _PARTS[kind], "text": ""}
            item: Object = {"summary": []}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
                item = {"role": "assistant", "status": "in_progress"}
            events += self._begin({"type": kind, **item, "content": []})
            self._last["content"] = [part]
            events.append(self._part_event("content_part.added", part=dict(part)))
        part = self._last["content"][0]
        part["text"] += text
        more: Object = {}
        if kind == "message":
            part["logprobs"] += shown
            more = {"logprobs": shown}
        return [*events, self._part_event(f"{part['type']}.delta", delta=text, **more)]

    def _call(self, call: Object) -> list[Object]:
        function = call["function"]
        item = {"type": "function_call", "status": "in_progress", "call_id": call["id"], "name": function["name"]}
        events = [*self._close(), *self._begin({**item, "arguments": ""})]
        self._last["arguments"] = function["arguments"]
        where = {"item_id": self._last["id"], "output_index": len(self._items) - 1}
        events.append(self._event("function_call_arguments.delta", **where, delta=function["arguments"]))
        events.append(self._event("function_call_arguments.done", **where, arguments=function["arguments"]))
        return [*events, *self._close()]

    @property
    def _last(self) -> Object:
        return self._items[-1]

    def _begin(self, item: Object) -> list[Object]:
        self._open = {"id": f"{_MARKS[item['type']]}_{uuid.uuid4().hex}", **item}
        self._items.append(self._open)
        return [self._event("output_item.added", output_index=len(self._items) - 1, item=dict(self._open))]

    def _close(self) -> list[Object]:
        """End the item that is open."""
        item, self._open = self._open, None
        if item is None:
            return []
        events = []
        if "status" in item:
            item["status"] = "completed" if self._finish != "length" else "incomplete"
        for part in item.get("content", []):
            logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            events.append(self._part_event(f"{part['type']}.done", text=part["text"], **logprobs))
            events.append(self._part_event("content_part.done", part=part))
        return [*events, self._event("output_item.done", output_index=len(self._items) - 1, item=item)]

    # Objects.

    def _part_event(self, kind: str, **fields: Any) -> Object:
        where = {"item_id": self._last["id"], "output_index": len(self._items) - 1, "content_index": 0}
        return self._event(kind, **where, **fields)

    def _event(self, kind: str, **fields: Any) -> Object:
        self._events += 1
        return {"type": f"response.{kind}", "sequence_number": self._events - 1, **fields}

    def _response(self) -> Object:
        asked, finish = self._asked, self._finish
        status = {None: "in_progress", "length": "incomplete"}.get(finish, "completed")
        text = asked.text.model_dump(by_alias=True, exclude_none=True) if asked.text else {}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if finish == "length" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": self._answer.model,
            "output": list(self._items),
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": asked.temperature,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": asked.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in asked.tools or []],
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": None if finish is None else self._usage(),
            **self._recalled,
        }

    def _usage(self) -> Object:
        counts = self._answer.usage()
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cache_write_tokens": 0, **counts["prompt_tokens_details"]},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._thoughts},
            "total_tokens": counts["total_tokens"],
        }
