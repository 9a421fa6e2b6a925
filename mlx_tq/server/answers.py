"""`Answer` collects the engine's events; `ChunkWriter` and `ResponseWriter` write it as OpenAI's objects."""

import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.generate import TextStateMachine, make_text_state_machine

from mlx_tq.server.api_errors import ApiError, InvalidRequestError
from mlx_tq.server.job import Event, Piece, Quoted, Started, TokenLogprob
from mlx_tq.server.schemas import ResponseRequest, with_response_names
from mlx_tq.session.restore import RecallResult
from mlx_tq.session.transcript import to_ranges

Object = dict[str, Any]
Decode = Callable[[list[int]], str]


@dataclass
class Delta:
    """The part of a message that a piece adds."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[Object] = field(default_factory=list)

    def to_dict(self) -> Object:
        return {name: value for name, value in vars(self).items() if value}


class MessageReader:
    """Splits the model's text into content, reasoning and tool calls.

    `state` is "reasoning" where the prompt ended inside the model's reasoning, else "normal". Without `tools` a call is
    text. If the answer is `constrained` to a grammar, all text after the reasoning is content.
    """

    def __init__(self, tokenizer: Any, state: str, tools: list[Object] | None, *, constrained: bool = False) -> None:
        machine = make_text_state_machine(tokenizer)
        if constrained:
            ends = [(tokenizer.think_end, "normal")] if tokenizer.has_thinking else []
            machine = TextStateMachine({"reasoning": ends})
        self._state = machine.make_state(state)
        self._parse, self._tools = tokenizer.tool_parser, tools
        self._call_text: str | None = None  # of a call that is not complete
        self.calls = 0

    def read(self, piece: Piece) -> Delta:
        self._state, segments = TextStateMachine.split(self._state, piece.text)
        if piece.finish_reason is not None:
            self._state, rest, state = TextStateMachine.flush(self._state)
            segments = [*segments, (state, rest)]
        delta = Delta()
        for state, text in segments:
            if state == "tool":
                self._call_text = (self._call_text or "") + text
                continue
            self._end_call(delta)
            if state == "reasoning":
                delta.reasoning += text
            else:
                delta.content += text
        if piece.finish_reason is not None:
            self._end_call(delta)
        return delta

    def _end_call(self, delta: Delta) -> None:
        """Parse a complete call; one that cannot be parsed becomes content."""
        if self._call_text is None:
            return
        text, self._call_text = self._call_text, None
        try:
            parsed = self._parse(text, self._tools)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):  # parsers of many models
            delta.content += text
            return
        for call in parsed if isinstance(parsed, list) else [parsed]:
            function = {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
            call_id = call.get("id") or f"call_{uuid.uuid4().hex[:24]}"
            delta.tool_calls.append({"index": self.calls, "id": call_id, "type": "function", "function": function})
            self.calls += 1


class TextReader:
    """Takes the text of a completion as it is."""

    calls = 0

    def read(self, piece: Piece) -> Delta:
        return Delta(content=piece.text)


@dataclass
class Choice:
    """One answer of a request, as far as it was generated."""

    reader: MessageReader | TextReader
    message: Delta = field(default_factory=Delta)
    logprobs: list[Object] = field(default_factory=list)
    finish_reason: str | None = None
    recall: Object = field(default_factory=dict)


@dataclass(frozen=True)
class Update:
    """The change of a choice by an event."""

    index: int
    delta: Delta
    logprobs: list[Object]
    choice: Choice


class Answer:
    """The answers to a request, collected from the events of its jobs.

    `rescued_tokens` counts the quoted tokens of a session; it is None outside of sessions.
    """

    def __init__(
        self,
        model: str,
        readers: Sequence[MessageReader | TextReader],
        prompt_tokens: int,
        rescued_tokens: int | None = None,
    ) -> None:
        self.model, self.is_chat = model, isinstance(readers[0], MessageReader)
        self.choices = [Choice(reader) for reader in readers]
        self.prompt_tokens, self.rescued_tokens = prompt_tokens, rescued_tokens
        self.cached_tokens = self.completion_tokens = 0
        self.session: Object | None = None  # report of the session, once that is known

    def add(self, event: Event, decode: Decode) -> Update | None:
        """Add an event. Return what clients see of it, or None for nothing."""
        if isinstance(event, Started):
            self.cached_tokens += event.cached_tokens
        elif isinstance(event, Quoted):
            self.prompt_tokens += event.tokens
            self.rescued_tokens = event.tokens
        if not isinstance(event, Piece):
            return None
        self.completion_tokens += 1
        choice = self.choices[event.index]
        delta = choice.reader.read(event)
        choice.message.content += delta.content
        choice.message.reasoning += delta.reasoning
        choice.message.tool_calls += delta.tool_calls
        if event.finish_reason is not None:
            calls_tools = event.finish_reason == "stop" and choice.reader.calls
            choice.finish_reason = "tool_calls" if calls_tools else event.finish_reason
        logprobs = [] if event.logprob is None else [_logprobs_object(event.logprob, event.top_logprobs, decode)]
        choice.logprobs += logprobs
        choice.recall = _recall_object(event.recalled)
        if not (delta.to_dict() or logprobs or choice.finish_reason):
            return None
        return Update(event.index, delta, logprobs, choice)

    @property
    def is_complete(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    def message(self) -> Object | None:
        """Return the message that a client sends back with its next request, or None for one with tool calls."""
        message = self.choices[0].message
        return None if message.tool_calls else {"role": "assistant", "content": message.content}

    def usage(self) -> Object:
        details = {"cached_tokens": self.cached_tokens}
        if self.rescued_tokens is not None:
            details["rescued_tokens"] = self.rescued_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": details,
        }


class ChunkWriter:
    """Writes an answer in the shape of /v1/chat/completions and /v1/completions: as one body, or as events."""

    end = "data: [DONE]\n\n"  # of a stream

    def __init__(self, answer: Answer) -> None:
        self._answer, self._is_chat = answer, answer.is_chat
        self._id, self._created = f"{'chatcmpl' if answer.is_chat else 'cmpl'}-{uuid.uuid4().hex}", int(time.time())

    def start_events(self) -> list[Object]:
        if not self._is_chat:
            return []
        delta = {"role": "assistant", "content": ""}
        count = len(self._answer.choices)
        return [self._object(".chunk", [{"index": n, "delta": delta, "finish_reason": None} for n in range(count)])]

    def events(self, update: Update) -> list[Object]:
        choice: Object = {"index": update.index, "finish_reason": update.choice.finish_reason}
        if update.logprobs:
            choice["logprobs"] = {"content": update.logprobs}
        choice.update({"delta": update.delta.to_dict()} if self._is_chat else {"text": update.delta.content})
        return [self._object(".chunk", [{**choice, **update.choice.recall}])]

    def end_events(self, *, usage: bool) -> list[Object]:
        return [{**self._object(".chunk", []), **self._counts()}] if usage else []

    def error_event(self, error: ApiError) -> Object:
        return error.body()

    def body(self) -> Object:
        choices = [self._choice(index, choice) for index, choice in enumerate(self._answer.choices)]
        return {**self._object("", choices), **self._counts()}

    def _choice(self, index: int, choice: Choice) -> Object:
        logprobs = {"content": choice.logprobs} if choice.logprobs else None
        body: Object = {"index": index, "finish_reason": choice.finish_reason, "logprobs": logprobs}
        if self._is_chat:
            calls = [{key: call[key] for key in call if key != "index"} for call in choice.message.tool_calls]
            message = {**choice.message.to_dict(), **({"tool_calls": calls} if calls else {})}
            body["message"] = {"role": "assistant", "content": None if calls else "", **message}
        else:
            body["text"] = choice.message.content
        return {**body, **choice.recall}

    def _counts(self) -> Object:
        session = self._answer.session
        return {"usage": self._answer.usage(), **({"session": session} if session else {})}

    def _object(self, suffix: str, choices: list[Object]) -> Object:
        kind = f"chat.completion{suffix}" if self._is_chat else "text_completion"
        head = {"id": self._id, "created": self._created, "model": self._answer.model}
        return {**head, "object": kind, "choices": choices}


_ID_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class ResponseWriter:
    """Writes an answer in the shape of /v1/responses: items of reasoning, text and calls, one after the other."""

    end = ""

    def __init__(self, answer: Answer, request: ResponseRequest) -> None:
        self._answer, self._request = answer, request
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._items: list[Object] = []
        self._open_item: Object | None = None  # the last item, while it grows
        self._reasoning_tokens = self._num_events = 0
        self._finish_reason: str | None = None

    def start_events(self) -> list[Object]:
        return [self._event(kind, response=self.body()) for kind in ("created", "in_progress")]

    def events(self, update: Update) -> list[Object]:
        delta, events = update.delta, list[Object]()
        if delta.reasoning:
            self._reasoning_tokens += 1
            events += self._add_text("reasoning", delta.reasoning, [])
        if delta.content or (update.logprobs and not delta.to_dict()):
            events += self._add_text("message", delta.content, update.logprobs)
        for call in delta.tool_calls:
            events += self._add_call(call)
        self._finish_reason = update.choice.finish_reason
        if self._finish_reason is not None:
            if not self._items:
                events += self._add_text("message", "", [])
            events += self._close_item()
        return events

    def end_events(self, *, usage: bool) -> list[Object]:
        """Return the last event, which always has the usage."""
        return [self._event("incomplete" if self._finish_reason == "length" else "completed", response=self.body())]

    def error_event(self, error: ApiError) -> Object:
        renamed = with_response_names(error) if isinstance(error, InvalidRequestError) else error
        return {**renamed.body()["error"], "type": "error", "sequence_number": self._num_events}

    def body(self) -> Object:
        request, finish_reason = self._request, self._finish_reason
        status = {None: "in_progress", "length": "incomplete"}.get(finish_reason, "completed")
        text = request.text.model_dump(by_alias=True, exclude_none=True) if request.text else {}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if finish_reason == "length" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self._answer.model,
            "output": list(self._items),
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": request.temperature,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": request.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in request.tools or []],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None if finish_reason is None else self._usage(),
            **self._answer.choices[0].recall,
        }

    def _usage(self) -> Object:
        usage = self._answer.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cache_write_tokens": 0, **usage["prompt_tokens_details"]},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }

    def _add_text(self, kind: str, text: str, logprobs: list[Object]) -> list[Object]:
        """Add text to the open item; first close that if it is of another kind."""
        events, is_message = [], kind == "message"
        if self._open_item is None or self._open_item["type"] != kind:
            part: Object = {"type": "output_text" if is_message else "reasoning_text", "text": ""}
            item: Object = {"summary": []}
            if is_message:
                part |= {"annotations": [], "logprobs": []}
                item = {"role": "assistant", "status": "in_progress"}
            events = [*self._close_item(), *self._open({"type": kind, **item, "content": []})]
            self._items[-1]["content"] = [part]
            events.append(self._part_event("content_part.added", part=dict(part)))
        part = self._items[-1]["content"][0]
        part["text"] += text
        if is_message:
            part["logprobs"] += logprobs
        fields = {"logprobs": logprobs} if is_message else {}
        return [*events, self._part_event(f"{part['type']}.delta", delta=text, **fields)]

    def _add_call(self, call: Object) -> list[Object]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        item = {"type": "function_call", "status": "in_progress", "call_id": call["id"], "name": name}
        events = [*self._close_item(), *self._open({**item, "arguments": ""})]
        self._items[-1]["arguments"] = arguments
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        events.append(self._event("function_call_arguments.delta", **place, delta=arguments))
        events.append(self._event("function_call_arguments.done", **place, arguments=arguments))
        return [*events, *self._close_item()]

    def _open(self, item: Object) -> list[Object]:
        self._open_item = {"id": f"{_ID_PREFIXES[item['type']]}_{uuid.uuid4().hex}", **item}
        self._items.append(self._open_item)
        return [self._event("output_item.added", output_index=len(self._items) - 1, item=dict(self._open_item))]

    def _close_item(self) -> list[Object]:
        item, self._open_item = self._open_item, None
        if item is None:
            return []
        events = []
        if "status" in item:
            item["status"] = "completed" if self._finish_reason != "length" else "incomplete"
        for part in item.get("content", []):
            logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            events.append(self._part_event(f"{part['type']}.done", text=part["text"], **logprobs))
            events.append(self._part_event("content_part.done", part=part))
        return [*events, self._event("output_item.done", output_index=len(self._items) - 1, item=item)]

    def _part_event(self, kind: str, **fields: Any) -> Object:
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, "content_index": 0}
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> Object:
        self._num_events += 1
        return {"type": f"response.{kind}", "sequence_number": self._num_events - 1, **fields}


Writer = ChunkWriter | ResponseWriter


def _recall_object(recalled: RecallResult | None) -> Object:
    """Return the tokens that were recalled for an answer, if any were archived."""
    if recalled is None or not recalled.archived:
        return {}
    return {
        "recalled": {
            "tokens": len(recalled.positions),
            "by_search": len(recalled.by_search),
            "ranges": [list(span) for span in to_ranges(recalled.positions)],
            "archived": recalled.archived,
            "ms": round(1000 * recalled.seconds, 1),
        }
    }


def _logprobs_object(logprob: TokenLogprob, top: tuple[TokenLogprob, ...], decode: Decode) -> Object:
    def entry(logprob: TokenLogprob) -> Object:
        text = decode([logprob.token])
        return {"token": text, "logprob": logprob.logprob, "bytes": list(text.encode())}

    return {**entry(logprob), "top_logprobs": [entry(other) for other in top]}
