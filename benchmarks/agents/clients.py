"""The requests of recorded clients: routes, headers and bodies as they send them, with made-up texts."""

import json
from dataclasses import dataclass
from typing import Any

from benchmarks.agents.texts import Texts, Trace

Object = dict[str, Any]
_CHAT, _RESPONSES, _MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
_SMALL_DEFINITION = 30  # tokens of a tool that the vendor's servers run, which has a type and no parameters


@dataclass(frozen=True)
class ClientRequest:
    """A request as a client sends it."""

    session: str
    number: int
    route: str
    headers: dict[str, str]
    body: Object
    is_side: bool


class Client:
    """Makes a trace's requests. Answers are limited to `answer_tokens` where the client sends a limit at all."""

    def __init__(self, trace: Trace, texts: Texts, answer_tokens: int) -> None:
        self.name = str(trace["client"]).rpartition("/")[2].split(" ")[0]
        self._dialect, self._texts, self._answer_tokens = trace["dialect"], texts, answer_tokens
        self._sizes = {part: tokens for part, (_, tokens) in trace["parts"].items()}

    def request(self, session: str, number: int, record: Object, model: str) -> ClientRequest:
        """Return a recorded request."""
        dialect = self._dialect
        body = {"chat": self._chat, "responses": self._responses, "anthropic": self._messages}[dialect](record)
        body |= {key: self._value(key, record, session, model) for key in record["keys"]}
        route, headers = record["route"], self._headers(session)
        if dialect == "anthropic":
            route += "?beta=true"
        return ClientRequest(session, number, route, headers, body, bool(record.get("side")))

    def as_chat(self, session: str, number: int, record: Object, model: str) -> ClientRequest:
        """Return a recorded request as a chat, for servers without the client's own route."""
        options = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        body = self._chat(record) | options | {"max_tokens": self._answer_tokens}
        return ClientRequest(session, number, _CHAT, {}, body, bool(record.get("side")))

    # Headers and options.

    def _headers(self, session: str) -> dict[str, str]:
        session_id = f"{self.name}-{session}"
        headers: dict[str, dict[str, str]] = {
            "claude-code": {
                "x-claude-code-session-id": session_id,
                "x-app": "cli",
                "anthropic-version": "2023-06-01",
                "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
                "user-agent": "claude-cli/2.1.328 (external, sdk-cli)",
            },
            "codex": {
                "session-id": session_id,
                "thread-id": session_id,
                "originator": "codex_exec",
                "accept": "text/event-stream",
            },
            "opencode-ai": {"X-Session-Id": session_id, "user-agent": "opencode/1.18.33"},
            "cline": {"HTTP-Referer": "https://cline.bot", "X-Title": "Cline"},
            "qwen-code": {"user-agent": "QwenCode/0.24.4 (linux; x64)"},
        }
        return {"authorization": "Bearer none", **headers.get(self.name, {"x-stainless-retry-count": "0"})}

    def _value(self, key: str, record: Object, session: str, model: str) -> Any:
        session_id = f"{self.name}-{session}"
        return {
            "model": model,
            "stream": record["stream"],
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "max_tokens": self._answer_tokens,
            "max_completion_tokens": self._answer_tokens,
            "store": False,
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "include": ["reasoning.encrypted_content"],
            "reasoning": {"effort": "medium", "summary": "auto"},
            "prompt_cache_key": session_id,
            "client_metadata": {"session_id": session_id},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "metadata": {"user_id": json.dumps({"session_id": session_id})},
            "output_config": {"effort": "high"},
            "thinking": {"type": "adaptive"},
        }[key]

    # Parts.

    def _definitions(self, record: Object) -> list[Object]:
        """Return name, description and parameters of each tool."""
        definitions = []
        for part in record["parts"]:
            if self._texts.kind(part) == "definition":
                words = self._texts[part].split(" ")
                path = {"type": "string", "description": " ".join(words[-len(words) // 4 :])}
                parameters = {"type": "object", "properties": {"path": path}, "required": ["path"]}
                description = " ".join(words[: -len(words) // 4])
                name = f"tool_{part[:3]}"
                definitions.append({"part": part, "name": name, "description": description, "parameters": parameters})
        return definitions

    def _turns(self, record: Object) -> list[tuple[str, str, list[tuple[str, Object]]]]:
        """Return role and text of each message, and the ids and arguments of an assistant message's calls."""
        turns: list[tuple[str, str, list[tuple[str, Object]]]] = []
        parts = [part for part in record["parts"] if self._texts.kind(part) != "definition"]
        for place, part in enumerate(parts):
            if self._texts.kind(part) == "assistant+call":
                call = (f"call_{place}_{part}", {"path": self._texts[part]})
                turns.append(("assistant", "", [call]))
            elif self._texts.kind(part) == "tool":
                call_id = next(calls[0][0] for _, _, calls in reversed(turns) if calls)
                turns.append(("tool", self._texts[part], [(call_id, {})]))
            else:
                turns.append((self._texts.kind(part), self._texts[part], []))
        return turns

    def _tool_name(self, record: Object) -> str:
        return next((str(definition["name"]) for definition in self._definitions(record)), "tool")

    # Bodies.

    def _chat(self, record: Object) -> Object:
        messages: list[Object] = []
        for role, text, calls in self._turns(record):
            message: Object = {"role": role, "content": text}
            if role == "tool":
                message["tool_call_id"] = calls[0][0]
            elif calls:
                message["content"] = None
                message["tool_calls"] = [
                    {
                        "id": call_id,
                        "type": "function",
                        "function": {"name": self._tool_name(record), "arguments": json.dumps(arguments)},
                    }
                    for call_id, arguments in calls
                ]
            messages.append(message)
        names = ("name", "description", "parameters")
        functions = [{name: definition[name] for name in names} for definition in self._definitions(record)]
        tools = [{"type": "function", "function": function} for function in functions]
        return {"messages": messages, **({"tools": tools} if tools else {})}

    def _responses(self, record: Object) -> Object:
        instructions, *turns = self._turns(record)
        items: list[Object] = []
        for role, text, calls in turns:
            if role == "tool":
                items.append({"type": "function_call_output", "call_id": calls[0][0], "output": text})
            elif calls:
                items += [
                    {
                        "type": "function_call",
                        "name": self._tool_name(record),
                        "arguments": json.dumps(arguments),
                        "call_id": call_id,
                    }
                    for call_id, arguments in calls
                ]
            else:
                kind = "output_text" if role == "assistant" else "input_text"
                content = [{"type": kind, "text": text}]
                sent_role = "developer" if role == "system" else role
                items.append({"type": "message", "role": sent_role, "content": content})
        tools: list[Object] = []
        for definition in self._definitions(record):
            if self._sizes[definition.pop("part")] < _SMALL_DEFINITION:
                tools.append({"type": "web_search", "external_web_access": False})
            else:
                tools.append({"type": "function", "strict": False, **definition})
        return {"instructions": instructions[1], "input": items, "tools": tools}

    def _messages(self, record: Object) -> Object:
        system_part = record["parts"][0]
        billing = (
            f"x-anthropic-billing-header: cc_version=2.1.328.{self._texts.billing[system_part]}; cc_entrypoint=cli;"
        )
        _, *turns = self._turns(record)
        cached = {"cache_control": {"type": "ephemeral"}}
        messages: list[Object] = []
        for role, text, calls in turns:
            block: Object = {"type": "text", "text": text}
            if role == "tool":
                block = {"type": "tool_result", "tool_use_id": calls[0][0], "content": text}
            elif calls:
                call_id, arguments = calls[0]
                block = {"type": "tool_use", "id": call_id, "name": self._tool_name(record), "input": arguments}
            sent_role = "user" if role == "tool" else role
            messages.append({"role": sent_role, "content": [block]})
        messages[-1]["content"][-1] |= cached
        tools = [
            {
                "name": definition["name"],
                "description": definition["description"],
                "input_schema": definition["parameters"],
            }
            for definition in self._definitions(record)
        ]
        system = [{"type": "text", "text": billing}, {"type": "text", "text": self._texts[system_part], **cached}]
        return {"system": system, "messages": messages, "tools": tools}
