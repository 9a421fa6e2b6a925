"""`Answer` collects the engine's events and writes them as OpenAI's completions, `ResponseAnswer` as its responses."""

import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.generate import TextStateMachine

from mlx_tq.grammar.call_grammar import GENERIC_FORM, CallForm
from mlx_tq.server.api_errors import ApiError
from mlx_tq.server.job import Event, Piece, Quoted, Started, TokenLogprob
from mlx_tq.server.opening_mark import OpeningMark
from mlx_tq.server.schemas import ResponseRequest, use_response_names
from mlx_tq.session.transcript import to_ranges

Object = dict[str, Any]
Transitions = dict[str, list[tuple[str, str]]]  # state to marks and next states

_ITEM_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "compaction": "cmp",
}  # of the ids of items in responses
_CONSTRAINED = "constrained"  # the state in which text has no marks
# Characters. Some models' parsers take quadratic time: at this length, about as long as generating the text.
_MAX_CALL = 2**16


@dataclass
class Delta:
    content: str = ""
    reasoning: str = ""
    tool_calls: list[Object] = field(default_factory=list)

    def to_dict(self) -> Object:
        """Return what there is; reasoning under both names that clients read."""
        reasoning_content = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return {name: value for name, value in vars(self).items() if value} | reasoning_content


class Choice:
    """One answer of a request, as far as it was generated, split into content, reasoning and tool calls.

    Without `tokenizer`, all text is content. `state` is "reasoning" where the prompt ended inside the model's
    reasoning; else an answer may begin with reasoning. If the answer is `constrained` to a grammar, all text after the
    reasoning is content, unless it begins with a call. Calls are parsed only if the request has `tools`, and not in the
    reasoning. A call that is not valid, or of none of the tools in `names`, is content with its marks, as are marks
    that the content only mentions. With `one_call`, the answer ends after its first call.
    """

    def __init__(
        self,
        tokenizer: Any = None,
        state: str = "normal",
        tools: Sequence[Object] = (),
        *,
        form: CallForm = GENERIC_FORM,
        names: Sequence[str] | None = None,
        constrained: bool = False,
        one_call: bool = False,
    ) -> None:
        self._tokenizer, self._tools, self._form, self._one_call = tokenizer, list(tools), form, one_call
        self._names = names
        transitions: Transitions = {}
        if tokenizer is not None:
            transitions = _transitions(tokenizer, form if tools else None)
        # Each is None once it is certain whether the answer begins with it.
        self._first_call = OpeningMark(form.start) if constrained and tools else None
        if self._first_call is not None:
            transitions = {
                source: [(mark, _CONSTRAINED if source == "reasoning" else target) for mark, target in edges]
                for source, edges in transitions.items()
            }
            transitions[_CONSTRAINED] = []
            state = _CONSTRAINED if state == "normal" else state
        self._machine = TextStateMachine(transitions)
        self._state = self._machine.make_state(state)
        may_reason = "reasoning" in transitions and state == "normal" and not constrained
        self._first_thought = OpeningMark(tokenizer.think_start) if may_reason else None
        self._call_text: str | None = None  # of a call that is not complete
        # Space at the start or after a call, which is content only if more follows; None inside other content.
        self._space = "" if tools else None
        self.message = Delta()
        self.logprobs: list[Object] = []
        self.finish_reason: str | None = None
        self.has_end = False  # whether the last piece was added
        self.has_more = False  # whether text was generated after the only call of `one_call`
        self.recall: Object = {}  # the tokens that were recalled for the answer, if any were archived

    def add(self, piece: Piece) -> Delta:
        """Add a piece; return what it adds to the message."""
        delta, message = Delta(), self.message
        for state, text in self._split(piece.text, is_last=piece.finish_reason is not None):
            if state != "tool":
                self._end_call(delta)
            if self._one_call and delta.tool_calls:
                self.has_more |= bool(text.strip())
            elif state == "tool":
                self._call_text = (self._call_text or "") + text
            elif state == "reasoning":
                delta.reasoning += text
            else:
                self._add_content(delta, text)
        if piece.finish_reason is not None:
            self._end_call(delta, finish_reason=piece.finish_reason)
            if piece.finish_reason == "stop" and self._state[0] == "reasoning" and self._tools:
                self._end_thought(delta)
            if not (message.tool_calls or delta.tool_calls):
                delta.content += self._space or ""
        message.content += delta.content
        message.reasoning += delta.reasoning
        message.tool_calls += delta.tool_calls
        self.has_end = piece.finish_reason is not None
        if piece.finish_reason is not None:
            calls_tools = piece.finish_reason == "stop" and message.tool_calls
            self.finish_reason = "tool_calls" if calls_tools else piece.finish_reason
        elif self._one_call and message.tool_calls:
            self.finish_reason = "tool_calls"
        recalled = piece.recalled
        if recalled is not None and recalled.archived:
            ranges = [list(span) for span in to_ranges(recalled.positions)]
            self.recall["recalled"] = {
                "tokens": len(recalled.positions),
                "by_search": len(recalled.by_search),
                "ranges": ranges,
                "archived": recalled.archived,
                "partial": recalled.is_partial,
                "ms": round(1000 * recalled.seconds, 1),
            }
        return delta

    def add_rest(self, piece: Piece) -> None:
        """Add a piece after the end of the answer, which is no part of the message."""
        self.has_end = piece.finish_reason is not None
        texts = [piece.text, *(text for _, text in self._split(piece.text, is_last=self.has_end))]
        self.has_more |= any(text.strip() for text in texts)

    def _add_content(self, delta: Delta, text: str) -> None:
        if self._space is not None:
            text, self._space = self._space + text, None
            if not text.strip():
                self._space = text
                return
        delta.content += text

    @property
    def is_in_call(self) -> bool:
        return self._call_text is not None

    def _split(self, text: str, *, is_last: bool) -> list[tuple[str, str]]:
        """Return the states that the text passes through, each with its part of the text, as far as it is certain."""
        if self._first_thought is not None:
            opening = self._first_thought.add(text, is_last=is_last)
            if opening is None:
                return []
            self._first_thought, text = None, self._enter("reasoning", self._tokenizer.think_start, *opening)
        segments: list[tuple[str, str]]
        self._state, segments = TextStateMachine.split(self._state, text)
        if self._first_call is not None and self._state[0] == _CONSTRAINED:
            segments += self._split_start(self._first_call, segments.pop()[1], is_last=is_last)
        if is_last:
            self._state, rest, state = TextStateMachine.flush(self._state)
            segments.append((state, rest))
        return segments

    def _enter(self, state: str, mark: str, is_opened: bool, text: str) -> str:
        """Enter a state if a text begins with its mark; return the text that is not processed."""
        if not is_opened:
            return text
        self._state = self._machine.make_state(state)
        return text.lstrip().removeprefix(mark)

    def _split_start(self, first_call: OpeningMark, text: str, *, is_last: bool) -> list[tuple[str, str]]:
        """Return the parts of a constrained answer's text, which has calls only if it begins with their mark."""
        opening = first_call.add(text, is_last=is_last)
        if opening is None:
            return []
        self._first_call, text = None, self._enter("tool", self._form.start, *opening)
        segments: list[tuple[str, str]]
        self._state, segments = TextStateMachine.split(self._state, text)
        return segments

    def _end_call(self, delta: Delta, finish_reason: str | None = None) -> None:
        """Parse the open call, if there is one, or make it content. At its end is a mark, or the end of the answer."""
        if self._call_text is None:
            return
        text, self._call_text = self._call_text, None
        start_mark, end_mark = self._form.start, self._form.end
        first_index = len(self.message.tool_calls) + len(delta.tool_calls)
        is_cut = finish_reason == "length" and end_mark
        calls = [] if is_cut else self._parse_calls(text, first_index)
        if not calls and not is_cut and start_mark in text:  # the first mark was only mentioned
            mention, text = text.rsplit(start_mark, 1)
            self._add_content(delta, start_mark + mention)
            calls = self._parse_calls(text, first_index)
        if calls:
            delta.tool_calls += calls[:1] if self._one_call else calls
            self.has_more |= self._one_call and len(calls) > 1
            self._space = ""
        else:
            self._add_content(delta, start_mark + text + (end_mark if finish_reason is None else ""))

    def _end_thought(self, delta: Delta) -> None:
        """Parse the complete calls at the end of reasoning that was not closed."""
        text, end_mark = (self.message.reasoning + delta.reasoning).rstrip(), self._form.end
        bodies: list[str] = []
        while end_mark and text.endswith(end_mark):
            text, start_mark, body = text.removesuffix(end_mark).rpartition(self._form.start)
            if not start_mark:
                break
            text, bodies = text.rstrip(), [body, *bodies]
        for body in bodies:
            delta.tool_calls += self._parse_calls(body, len(self.message.tool_calls) + len(delta.tool_calls))
        if self._one_call:
            self.has_more |= len(delta.tool_calls) > 1
            del delta.tool_calls[1:]

    def _parse_calls(self, text: str, first_index: int) -> list[Object]:
        """Return the calls in a text; none if clients could not read them."""
        if len(text) > _MAX_CALL:
            return []
        try:
            parsed = self._form.parse(text, self._tools)
            parsed = parsed if isinstance(parsed, list) else [parsed]
            calls = [_call_object(call, index) for index, call in enumerate(parsed, first_index)]
            json.dumps(calls, ensure_ascii=False).encode()  # which lone surrogates prevent
        except Exception:  # noqa: BLE001 - whatever the parsers of many models raise
            return []
        if self._names is not None and any(call["function"]["name"] not in self._names for call in calls):
            return []
        return calls


def _transitions(tokenizer: Any, form: CallForm | None) -> Transitions:
    """Return the marks that end each state, and the next states.

    They are those of mlx-lm's `make_text_state_machine`, but reasoning is not opened inside the content, and calls are
    neither in the reasoning nor in answers to requests without tools, which have no `form`.
    """
    transitions: Transitions = {"normal": [(mark, "normal") for mark in tokenizer.structural_markers]}
    if tokenizer.has_thinking:
        transitions["reasoning"] = [(tokenizer.think_end, "normal")]
    for state, edges in tokenizer.response_transitions.items():
        transitions.setdefault(state, []).extend(edge for edge in edges if form is not None or edge[1] != "tool")
    if form is not None:
        if all(target != "tool" for edges in transitions.values() for _, target in edges):
            transitions["normal"].append((form.start, "tool"))
        transitions["tool"] = [(form.end, "normal")] if form.end else []
    return transitions


def _call_object(call: Object, index: int) -> Object:
    """Return a parsed call as clients expect it: with a name, and an object of arguments as JSON."""
    arguments = call.get("arguments", call.get("parameters"))  # Llama calls them parameters
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}")
    if arguments is None:
        arguments = {}
    name, call_id = call["name"], call.get("id")
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise TypeError("a call needs a name and an object of arguments")
    if not isinstance(call_id, str):
        call_id = f"call_{uuid.uuid4().hex[:24]}"
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False, allow_nan=False)}
    return {"index": index, "id": call_id, "type": "function", "function": function}


def _without_index(calls: Sequence[Object]) -> list[Object]:
    return [{key: call[key] for key in call if key != "index"} for call in calls]


def _custom_input(arguments: str) -> str:
    """Return the text for a custom tool: the argument `input`, or all arguments where the model named it otherwise."""
    text = json.loads(arguments).get("input")
    return text if isinstance(text, str) else arguments


class Answer:
    """The answers to a request, collected from the events of its jobs and written as chat or text completions.

    `rescued_tokens` counts the quoted tokens of a session; it is None outside of sessions.
    """

    media_type = "text/event-stream"  # of a stream
    stream_end = "data: [DONE]\n\n"
    comments_progress = True  # whether a stream has comments with the progress of the prefill
    usage_scale = 1.0  # of prompt tokens, for the clients of an API that need it

    def __init__(
        self,
        model: str,
        choices: list[Choice],
        prompt_tokens: int,
        decode: Callable[[list[int]], str],
        rescued_tokens: int | None = None,
        *,
        is_chat: bool = True,
    ) -> None:
        self._model, self._decode, self._is_chat = model, decode, is_chat
        self._id, self._created = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}", int(time.time())
        self.choices, self.prompt_tokens, self.rescued_tokens = choices, prompt_tokens, rescued_tokens
        self.cached_tokens = self.completion_tokens = 0
        self.first_token_at = self.last_token_at = 0.0  # by `time.perf_counter`
        self.session: Object | None = None  # report of the session, once that is known

    def add(self, event: Event) -> list[Object]:
        """Add an event; return what a stream shows of it."""
        if isinstance(event, Started):
            self.cached_tokens += event.cached_tokens
        elif isinstance(event, Quoted):
            self.prompt_tokens += event.tokens
            self.rescued_tokens = event.tokens
        if not isinstance(event, Piece):
            return []
        choice = self.choices[event.index]
        if choice.finish_reason is not None:  # it has ended itself, and its job or others have not
            choice.add_rest(event)
            return []
        self.completion_tokens += 1
        self.last_token_at = time.perf_counter()
        self.first_token_at = self.first_token_at or self.last_token_at
        delta, logprobs = choice.add(event), list[Object]()
        if event.logprob is not None:
            top = [self._logprob_object(other) for other in event.top_logprobs]
            logprobs = [{**self._logprob_object(event.logprob), "top_logprobs": top}]
            choice.logprobs += logprobs
        return self._stream(event.index, delta, logprobs) if delta.to_dict() or logprobs or choice.finish_reason else []

    def _logprob_object(self, logprob: TokenLogprob) -> Object:
        text = self._decode([logprob.token])
        is_partial = "\ufffd" in text  # the token is a part of a character
        return {"token": text, "logprob": logprob.logprob, "bytes": None if is_partial else list(text.encode())}

    @property
    def is_complete(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    @property
    def is_all_generated(self) -> bool:
        """Whether the messages are all that the model generated, up to its end."""
        return all(choice.has_end and not choice.has_more for choice in self.choices)

    def message(self) -> Object:
        """Return the message that a client sends back with its next request, without the reasoning."""
        message = self.choices[0].message
        calls = {"tool_calls": _without_index(message.tool_calls)} if message.tool_calls else {}
        return {"role": "assistant", "content": message.content, **calls}

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

    def start_events(self) -> list[Object]:
        delta = {"role": "assistant", "content": ""}
        choices = [{"index": n, "delta": delta, "finish_reason": None} for n in range(len(self.choices))]
        return [self._object(".chunk", choices)] if self._is_chat else []

    def _stream(self, index: int, delta: Delta, logprobs: list[Object]) -> list[Object]:
        chunk: Object = {"index": index, "finish_reason": self.choices[index].finish_reason}
        if logprobs:
            chunk["logprobs"] = {"content": logprobs}
        chunk.update({"delta": delta.to_dict()} if self._is_chat else {"text": delta.content})
        return [self._object(".chunk", [{**chunk, **self.choices[index].recall}])]

    def end_events(self, *, usage: bool) -> list[Object]:
        return [{**self._object(".chunk", []), **self._counts()}] if usage else []

    def error_event(self, error: ApiError) -> Object:
        return error.body()

    def event_text(self, event: Object) -> str:
        """Return an event as a stream has it."""
        name = f"event: {event['type']}\n" if "type" in event else ""
        return f"{name}data: {json.dumps(event)}\n\n"

    def body(self) -> Object:
        choices = []
        for index, choice in enumerate(self.choices):
            logprobs = {"content": choice.logprobs} if choice.logprobs else None
            body: Object = {"index": index, "finish_reason": choice.finish_reason, "logprobs": logprobs}
            if self._is_chat:
                calls = _without_index(choice.message.tool_calls)
                message = {**choice.message.to_dict(), **({"tool_calls": calls} if calls else {})}
                body["message"] = {"role": "assistant", "content": None if calls else "", **message}
            else:
                body["text"] = choice.message.content
            choices.append({**body, **choice.recall})
        return {**self._object("", choices), **self._counts()}

    def _counts(self) -> Object:
        return {"usage": self.usage(), **({"session": self.session} if self.session else {})}

    def _object(self, suffix: str, choices: list[Object]) -> Object:
        kind = f"chat.completion{suffix}" if self._is_chat else "text_completion"
        return {"id": self._id, "created": self._created, "model": self._model, "object": kind, "choices": choices}


class ResponseAnswer(Answer):
    """An answer in the shape of /v1/responses: items of reasoning, text and calls, one after the other."""

    stream_end = ""

    def __init__(self, *args: Any, request: ResponseRequest) -> None:
        super().__init__(*args)
        self._request, self._id = request, f"resp_{uuid.uuid4().hex}"
        self._tools = {tool.full_name: tool for tool in request.tools or []}
        self._items: list[Object] = []
        self._open_item: Object | None = None  # the last item, while it grows
        self._reasoning_tokens = self._num_events = 0
        self._finish_reason: str | None = None
        self._events: list[Object] = []  # not yet returned

    def start_events(self) -> list[Object]:
        for kind in ("created", "in_progress"):
            self._emit(kind, response=self.body())
        return self._take_events()

    def _stream(self, index: int, delta: Delta, logprobs: list[Object]) -> list[Object]:
        if delta.reasoning:
            self._reasoning_tokens += 1
            self._add_text("reasoning", delta.reasoning, [])
        if delta.content or (logprobs and not delta.to_dict()):
            self._add_text("message", delta.content, logprobs)
        for call in delta.tool_calls:
            arguments = call["function"]["arguments"]
            tool = self._tools.get(call["function"]["name"])
            fields = {"call_id": call["id"], "name": call["function"]["name"]}
            if tool is not None:
                fields["name"] = tool.name
                if tool.namespace is not None:
                    fields["namespace"] = tool.namespace
            if tool is not None and tool.type == "custom":
                self._add_call("custom_tool_call", "input", _custom_input(arguments), fields)
            else:
                self._add_call("function_call", "arguments", arguments, {**fields, "status": "in_progress"})
        self._finish_reason = self.choices[0].finish_reason
        if self._finish_reason is not None:
            if not self._items:
                self._add_text("message", "", [])
            self._close_item()
        return self._take_events()

    def _add_call(self, kind: str, key: str, text: str, fields: Object) -> None:
        self._open(kind, **fields, **{key: ""})
        self._items[-1][key] = text
        event = f"{kind}_{key}"
        self._emit(f"{event}.delta", **self._place(), delta=text)
        self._emit(f"{event}.done", **self._place(), **{key: text})
        self._close_item()

    def end_events(self, *, usage: bool) -> list[Object]:
        """Return the last event, which always has the usage."""
        self._emit("incomplete" if self._finish_reason == "length" else "completed", response=self.body())
        return self._take_events()

    def error_event(self, error: ApiError) -> Object:
        use_response_names(error)
        return {**error.body()["error"], "type": "error", "sequence_number": self._num_events}

    def body(self) -> Object:
        request, finish_reason, usage = self._request, self._finish_reason, self.usage()
        text = request.text.model_dump(by_alias=True, exclude_none=True) if request.text else {}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": {None: "in_progress", "length": "incomplete"}.get(finish_reason, "completed"),
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if finish_reason == "length" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "metadata": request.metadata or {},
            "model": self._model,
            "output": list(self._items),
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": request.tool_choice or "auto",
            "tools": [tool.model_dump(exclude={"namespace"}) for tool in request.tools or []],
            "truncation": "disabled",
            "usage": finish_reason
            and {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cache_write_tokens": 0, **usage["prompt_tokens_details"]},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
                "total_tokens": usage["total_tokens"],
            },
            **self.choices[0].recall,
        }

    def _add_text(self, kind: str, text: str, logprobs: list[Object]) -> None:
        """Add text to the open item; first close that if it is of another kind."""
        is_message = kind == "message"
        if self._open_item is None or self._open_item["type"] != kind:
            part: Object = {"type": "output_text" if is_message else "reasoning_text", "text": ""}
            fields: Object = {"summary": []}
            if is_message:
                part |= {"annotations": [], "logprobs": []}
                fields = {"role": "assistant", "status": "in_progress"}
            self._open(kind, **fields, content=[])
            self._items[-1]["content"] = [part]
            self._emit("content_part.added", **self._place(), content_index=0, part=dict(part))
        part = self._items[-1]["content"][0]
        part["text"] += text
        if is_message:
            part["logprobs"] += logprobs
        added = {"delta": text, **({"logprobs": logprobs} if is_message else {})}
        self._emit(f"{part['type']}.delta", **self._place(), content_index=0, **added)

    def _open(self, kind: str, **fields: Any) -> None:
        self._close_item()
        prefix = _ITEM_PREFIXES[kind]
        self._open_item = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, **fields}
        self._items.append(self._open_item)
        self._emit("output_item.added", output_index=len(self._items) - 1, item=dict(self._open_item))

    def _close_item(self) -> None:
        item, self._open_item = self._open_item, None
        if item is None:
            return
        if "status" in item:
            item["status"] = "incomplete" if self._finish_reason == "length" else "completed"
        for part in item.get("content", []):
            logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            self._emit(f"{part['type']}.done", **self._place(), content_index=0, text=part["text"], **logprobs)
            self._emit("content_part.done", **self._place(), content_index=0, part=part)
        self._emit("output_item.done", output_index=len(self._items) - 1, item=item)

    def _place(self) -> Object:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _emit(self, kind: str, **fields: Any) -> None:
        self._events.append({"type": f"response.{kind}", "sequence_number": self._num_events, **fields})
        self._num_events += 1

    def _take_events(self) -> list[Object]:
        events, self._events = self._events, []
        return events
