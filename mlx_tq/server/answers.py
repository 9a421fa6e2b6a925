"""From the engine's pieces to OpenAI's objects, whole and in chunks."""

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.generate import TextStateMachine, make_text_state_machine

from mlx_tq.server.errors import ApiError
from mlx_tq.server.jobs import Choice, Event, Piece, Quoted, Started
from mlx_tq.session.recall import Recalled
from mlx_tq.session.spans import runs


@dataclass
class Delta:
    """What a piece adds to a message."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Its fields that are not empty."""
        return {name: value for name, value in vars(self).items() if value}


class MessageReader:
    """Takes the model's text apart: what it says, what it thinks, which functions it calls.

    Args:
        tokenizer: knows the marks of the model's reasoning and calls.
        state: "normal" or "reasoning", where the prompt ended.
        tools: of the request; without them a call is text.
        constrained: behind its thoughts all is what it says, whatever marks that holds.
    """

    def __init__(
        self, tokenizer: Any, state: str, tools: list[dict[str, Any]] | None, *, constrained: bool = False
    ) -> None:
        marks = make_text_state_machine(tokenizer)
        if constrained:
            thoughts = [(tokenizer.think_end, "normal")] if tokenizer.has_thinking else []
            marks = TextStateMachine({"reasoning": thoughts})
        self._state = marks.make_state(state)
        self._parse, self._tools = tokenizer.tool_parser, tools
        self._call: str | None = None  # the text of a call that has begun
        self.calls = 0

    def read(self, piece: Piece) -> Delta:
        """What a piece of text adds to the answer."""
        self._state, segments = TextStateMachine.split(self._state, piece.text)
        if piece.finish is not None:
            self._state, rest, state = TextStateMachine.flush(self._state)
            segments = [*segments, (state, rest)]
        delta = Delta()
        for state, text in segments:
            if state == "tool":
                self._call = (self._call or "") + text
                continue
            self._end_call(delta)
            if state == "reasoning":
                delta.reasoning += text
            else:
                delta.content += text
        if piece.finish is not None:
            self._end_call(delta)
        return delta

    def _end_call(self, delta: Delta) -> None:
        """Parse a call that is complete; one that cannot be parsed is handed over as the text that it is."""
        if self._call is None:
            return
        text, self._call = self._call, None
        try:
            parsed = self._parse(text, self._tools)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):  # parsers of many models
            delta.content += text
            return
        for call in parsed if isinstance(parsed, list) else [parsed]:
            name, arguments = call["name"], json.dumps(call["arguments"], ensure_ascii=False)
            identity = call.get("id") or f"call_{uuid.uuid4().hex[:24]}"
            delta.tool_calls.append(
                {
                    "index": self.calls,
                    "id": identity,
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
            )
            self.calls += 1


class TextReader:
    """The text of a completion is what the model wrote."""

    calls = 0

    def read(self, piece: Piece) -> Delta:
        """What a piece of text adds to the answer."""
        return Delta(content=piece.text)


@dataclass
class _Said:
    """What was said so far of one answer."""

    reader: MessageReader | TextReader
    whole: Delta = field(default_factory=Delta)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None
    recalled: Recalled | None = None


class Answer:
    """The answer to a request in the making, or several to one prompt.

    Args:
        model: name to report.
        readers: of the pieces, one for each of them.
        prompt_tokens: for the usage.
        rescued: tokens of the prompt that quote what a session had lost; None outside of sessions.
    """

    done = "data: [DONE]\n\n"  # the end of a stream

    def __init__(
        self,
        model: str,
        readers: Sequence[MessageReader | TextReader],
        prompt_tokens: int,
        rescued: int | None = None,
    ) -> None:
        self.model = model
        self._said = [_Said(reader) for reader in readers]
        self._chat = isinstance(readers[0], MessageReader)
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self.prompt_tokens, self.cached, self.tokens, self.rescued = prompt_tokens, 0, 0, rescued
        self.session: dict[str, Any] | None = None  # what its session holds, when that is known

    def add(self, piece: Piece, names: Any) -> list[dict[str, Any]]:
        """The chunk of a stream for a piece, none where it shows nothing; `names` gives the text of a token."""
        self.tokens += 1
        said = self._said[piece.index]
        delta = said.reader.read(piece)
        said.whole.content += delta.content
        said.whole.reasoning += delta.reasoning
        said.whole.tool_calls += delta.tool_calls
        if piece.finish is not None:
            said.finish = "tool_calls" if piece.finish == "stop" and said.reader.calls else piece.finish
        shown = [] if piece.choice is None else [_logprob(piece.choice, piece.top, names)]
        said.logprobs += shown
        said.recalled = piece.recalled
        if not (delta.to_dict() or shown or said.finish):
            return []
        choice: dict[str, Any] = {"index": piece.index, "finish_reason": said.finish}
        if shown:
            choice["logprobs"] = {"content": shown}
        choice.update({"delta": delta.to_dict()} if self._chat else {"text": delta.content})
        choice.update(_recall(said.recalled))
        return [self._object("chunk", [choice])]

    def told(self, event: Event) -> None:
        """What counts of an event that says nothing."""
        if isinstance(event, Started):
            self.cached += event.cached
        elif isinstance(event, Quoted):
            self.prompt_tokens += event.tokens
            self.rescued = event.tokens

    @property
    def is_complete(self) -> bool:
        """Whether all pieces were added."""
        return all(said.finish is not None for said in self._said)

    def message(self) -> dict[str, Any] | None:
        """The message that a client sends back with its next request; None for one that calls functions."""
        whole = self._said[0].whole
        return None if whole.tool_calls else {"role": "assistant", "content": whole.content}

    def opening(self) -> list[dict[str, Any]]:
        """The first chunk of a stream, with the role."""
        if not self._chat:
            return []
        delta = {"role": "assistant", "content": ""}
        choices = [{"index": index, "delta": delta, "finish_reason": None} for index in range(len(self._said))]
        return [self._object("chunk", choices)]

    def closing(self, *, usage: bool) -> list[dict[str, Any]]:
        """The last chunk of a stream, with the counts, where they are asked for."""
        return [{**self._object("chunk", []), **self._counts()}] if usage else []

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The last event of a stream that an error ends."""
        return error.body()

    def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        choices = [self._choice(index, said) for index, said in enumerate(self._said)]
        return {**self._object("", choices), **self._counts()}

    def _choice(self, index: int, said: _Said) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": said.finish, "logprobs": None}
        if said.logprobs:
            choice["logprobs"] = {"content": said.logprobs}
        if self._chat:
            calls = [{key: value for key, value in call.items() if key != "index"} for call in said.whole.tool_calls]
            message = {**said.whole.to_dict(), **({"tool_calls": calls} if calls else {})}
            choice["message"] = {"role": "assistant", "content": None if calls else "", **message}
        else:
            choice["text"] = said.whole.content
        return {**choice, **_recall(said.recalled)}

    def usage(self) -> dict[str, Any]:
        """Counts of tokens, and how many of the prompt's were in a cache, and in a session came back to it."""
        details = {"cached_tokens": self.cached}
        if self.rescued is not None:
            details["rescued_tokens"] = self.rescued
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.tokens,
            "total_tokens": self.prompt_tokens + self.tokens,
            "prompt_tokens_details": details,
        }

    def _counts(self) -> dict[str, Any]:
        return {"usage": self.usage(), **({"session": self.session} if self.session else {})}

    def _object(self, part: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = ("chat.completion" + (f".{part}" if part else "")) if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices}


def _recall(recalled: Recalled | None) -> dict[str, Any]:
    """What came back to an answer as rows, where something had left: tokens, from where, and in how much time."""
    if recalled is None or not recalled.archived:
        return {}
    return {
        "recalled": {
            "tokens": len(recalled.positions),
            "by_meaning": len(recalled.meaning),
            "ranges": [list(span) for span in runs(recalled.positions)],
            "archived": recalled.archived,
            "ms": round(1000 * recalled.seconds, 1),
        }
    }


def _logprob(choice: Choice, top: tuple[Choice, ...], names: Any) -> dict[str, Any]:
    def entry(one: Choice) -> dict[str, Any]:
        name = str(names([one.token]))
        return {"token": name, "logprob": one.logprob, "bytes": list(name.encode())}

    return {**entry(choice), "top_logprobs": [entry(one) for one in top]}
