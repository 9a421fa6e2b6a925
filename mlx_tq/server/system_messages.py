"""System messages as chat templates take them: one at the start, and others only where the template shows them.

A later one is never moved to the start, because no prompt would share the beginning of an earlier one then.
"""

from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]


def join_leading(messages: Sequence[Message]) -> list[Message]:
    """Return messages in which the system messages at the start are one."""
    count = next((n for n, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if count < 2:
        return list(messages)
    text = "\n\n".join(str(message["content"]) for message in messages[:count])
    return [{**messages[0], "content": text}, *messages[count:]]


def has_later(messages: Sequence[Message]) -> bool:
    return any(message["role"] == "system" for message in messages[1:])


def fold_later(messages: Sequence[Message]) -> list[Message]:
    """Return messages in which each system message after the first message begins the user message that follows it.

    Where none follows it immediately, it ends the user message before it, or is one.
    """
    folded: list[Message] = list(messages[:1])
    texts: list[str] = []

    def add() -> None:
        if folded[-1]["role"] == "user":
            folded[-1] = {**folded[-1], "content": "\n\n".join([str(folded[-1]["content"]), *texts])}
        else:
            folded.append({"role": "user", "content": "\n\n".join(texts)})

    for message in messages[1:]:
        if message["role"] == "system":
            texts.append(f"<system>\n{message['content']}\n</system>")
            continue
        if texts and message["role"] == "user":
            message = {**message, "content": "\n\n".join([*texts, str(message["content"])])}
        elif texts:
            add()
        texts = []
        folded.append(message)
    if texts:
        add()
    return folded
