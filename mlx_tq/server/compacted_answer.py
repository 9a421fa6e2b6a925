"""`CompactedAnswer` writes an answer as one item of /v1/responses, which stands for the conversation so far."""

import uuid
from typing import Any

from mlx_tq.server.answers import Delta, Object, ResponseAnswer
from mlx_tq.server.api_errors import ModelFailedError
from mlx_tq.server.schemas import MessageItem


class CompactedAnswer(ResponseAnswer):
    """The summary that a request asks for. `replaces_input` writes what takes the place of the whole input."""

    def __init__(self, *args: Any, replaces_input: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self._replaces_input = replaces_input

    def _stream(self, index: int, delta: Delta, logprobs: list[Object]) -> list[Object]:
        choice = self.choices[0]
        self._reasoning_tokens += bool(delta.reasoning)
        if choice.finish_reason is None:
            return []
        if choice.finish_reason == "length":
            raise ModelFailedError(
                f"the summary of the conversation did not end within {self.completion_tokens} tokens; raise "
                "max_output_tokens, or leave it out"
            )
        summary = choice.message.content.strip()
        if not summary:
            raise ModelFailedError("the model wrote no summary of the conversation; try again, or use another model")
        self._finish_reason = "stop"
        self._open("compaction", encrypted_content=summary)
        self._close_item()
        return self._take_events()

    def body(self) -> Object:
        body = super().body()
        if not self._replaces_input:
            return body
        users = [item for item in self._request.items if isinstance(item, MessageItem) and item.role == "user"]
        messages = [
            {
                "id": f"msg_{uuid.uuid4().hex}",
                "type": "message",
                "role": "user",
                "status": "completed",
                "content": [{"type": "input_text", "text": item.text}],
            }
            for item in users
        ]
        names = ("id", "created_at", "model", "usage")
        return {
            **{name: body[name] for name in names},
            "object": "response.compaction",
            "output": [*messages, *body["output"]],
        }
