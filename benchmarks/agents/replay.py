"""Send recorded requests of coding agents to a server, and print how many prompt tokens it reused.

    python -m benchmarks.agents.replay http://127.0.0.1:8080 claude-code opencode --model smollm2

Each client has a thread of its own and sends its own route, headers and fields with made-up texts. `--chats` sends all
as chats, for servers that have no other route. What could be reused is computed with the template and tokenizer of
`--model`, which have to be the server's. It is what a prompt shares with any earlier one of its own client.
"""

import argparse
import json
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.agents.clients import Client, ClientRequest
from benchmarks.agents.texts import TRACES, Texts, one_token_words, read_trace, requests_of
from mlx_tq.models import load
from mlx_tq.prefix_cache.prefix_cache import common_prefix
from mlx_tq.server.messages_schemas import MessagesRequest
from mlx_tq.server.prompt_builder import PromptBuilder
from mlx_tq.server.schemas import ChatRequest, ResponseRequest, parse

TEMPLATE = (Path(__file__).parent / "template.jinja").read_text(encoding="utf-8")
_DIVERGED = 256  # tokens that a request may prefill again if it diverges inside an earlier prompt


@dataclass(frozen=True)
class Reuse:
    """What a server reported of one request, and what it could have reused."""

    client: str
    session: str
    number: int
    is_side: bool
    prompt_tokens: int
    shared_tokens: int
    cached_tokens: int
    diverges: bool  # inside an earlier prompt, instead of continuing it
    first_token: float  # seconds

    @property
    def lost_tokens(self) -> int:
        """Shared tokens that were prefilled again, without those that a request that diverges may lose."""
        return max(0, self.shared_tokens - self.cached_tokens - _DIVERGED * self.diverges)


class Prompts:
    """The prompts that requests become, and what they share with the earlier ones."""

    def __init__(self, tokenizer: Any) -> None:
        self._builder, self._earlier = PromptBuilder(tokenizer, {}), list[np.ndarray]()

    @property
    def lengths(self) -> list[int]:
        return list(map(len, self._earlier))

    def add(self, request: ClientRequest) -> tuple[int, bool]:
        """Add a prompt; return how many tokens it shares with an earlier one, and whether it diverges inside that."""
        body = json.dumps(request.body).encode()
        if "/messages" in request.route:
            chat = parse(MessagesRequest, body, set()).to_chat()
        elif "/responses" in request.route:
            chat = parse(ResponseRequest, body, set()).to_chat()
        else:
            chat = parse(ChatRequest, body, set())
        ids = np.array(self._builder.chat_prompt(chat).ids)
        shared, length = max(((common_prefix(other, ids), -len(other)) for other in self._earlier), default=(0, 0))
        self._earlier.append(ids)
        return min(shared, len(ids) - 1), min(shared, len(ids) - 1) < -length


def read_events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: {"):
            event: dict[str, Any] = json.loads(line.removeprefix("data: "))
            yield event


def is_answer(event: dict[str, Any]) -> bool:
    """Return whether an event has a part of the answer, or its end."""
    choices = event.get("choices")
    if choices:
        delta = choices[0].get("delta") or {}
        has_text = any(delta.get(name) for name in ("content", "reasoning", "tool_calls"))
        return has_text or choices[0].get("finish_reason") is not None
    kind = str(event.get("type", ""))
    return kind.endswith(".delta") or kind in ("content_block_delta", "message_delta", "response.completed")


def _counts(event: dict[str, Any]) -> tuple[int, int] | None:
    """Return the tokens of the prompt and the cached ones of it, if an event has them."""
    usage = event.get("usage") or (event.get("response") or {}).get("usage")
    if not usage:
        return None
    if "cache_read_input_tokens" in usage:
        return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["cache_read_input_tokens"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return usage.get("prompt_tokens") or usage.get("input_tokens"), details.get("cached_tokens", 0)


def send(http: httpx.Client, request: ClientRequest) -> tuple[int, int, float]:
    """Return the tokens of a prompt, the cached ones, and the seconds to the first token; raise if it is refused."""
    body, started, first, counts = request.body, time.perf_counter(), 0.0, None
    if body.get("stream") and "/chat" in request.route:  # one client does not ask for the usage
        body = {**body, "stream_options": {"include_usage": True}}
    with http.stream("POST", request.route, json=body, headers=request.headers) as response:
        if response.status_code != httpx.codes.OK:
            response.read()
            message = f"{request.session} {request.number}: {response.status_code}: {response.text[:300]}"
            raise RuntimeError(message)
        is_stream = "event-stream" in response.headers["content-type"]
        for event in read_events(response.iter_lines()) if is_stream else [json.loads(response.read())]:
            if event.get("error"):
                raise RuntimeError(f"{request.session} {request.number}: {event['error']}")
            if not first and (not is_stream or is_answer(event)):
                first = time.perf_counter() - started
            counts = _counts(event) or counts
    return *(counts or (0, 0)), first


class Replay:
    """The requests of one client, in the recorded order, and what a server reused of them."""

    def __init__(self, client: str, tokenizer: Any, words: list[str], answer_tokens: int, *, as_chats: bool) -> None:
        trace = read_trace(client)
        self._name, self._prompts = client, Prompts(tokenizer)
        made = Client(trace, Texts(trace, words), answer_tokens)
        make = made.as_chat if as_chats else made.request
        self._requests = [make(*found, "default_model") for found in requests_of(trace)]

    def of(self, *sessions: str) -> list[ClientRequest]:
        return [request for request in self._requests if request.session in sessions]

    def play(self, url: str, requests: Iterable[ClientRequest]) -> Iterator[Reuse]:
        """Send requests one after the other."""
        with httpx.Client(base_url=url, timeout=600) as http:
            for request in requests:
                shared, diverges = self._prompts.add(request)
                tokens, cached, first = send(http, request)
                name, number = request.session, request.number
                yield Reuse(self._name, name, number, request.is_side, tokens, shared, cached, diverges, first)


def summarize(reuses: list[Reuse]) -> dict[str, Any]:
    shared = sum(reuse.shared_tokens for reuse in reuses)
    reused = sum(min(reuse.shared_tokens, reuse.cached_tokens) for reuse in reuses)
    return {
        "requests": len(reuses),
        "prompt_tokens": sum(reuse.prompt_tokens for reuse in reuses),
        "shared_tokens": shared,
        "reused_share": round(reused / shared, 5) if shared else None,
        "lost_tokens": sum(reuse.lost_tokens for reuse in reuses),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("clients", nargs="+", choices=sorted(path.stem for path in TRACES.glob("*.json")))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--sessions", nargs="+", default=["s1", "s2", "s3", "c", "p2"])
    parser.add_argument("--answer-tokens", type=int, default=16)
    parser.add_argument("--chats", action="store_true", help="send all requests as chats")
    args = parser.parse_args()
    tokenizer = load(args.model, tokenizer_config={"chat_template": TEMPLATE})[1]
    words, results = one_token_words(tokenizer), list[Reuse]()

    def play(client: str) -> None:
        replay = Replay(client, tokenizer, words, args.answer_tokens, as_chats=args.chats)
        for reuse in replay.play(args.url, replay.of(*args.sessions)):
            print(reuse, flush=True)
            results.append(reuse)

    with ThreadPoolExecutor(len(args.clients)) as pool:
        list(pool.map(play, args.clients))  # which raises the first error of a client
    print(json.dumps(summarize(results)))


if __name__ == "__main__":
    main()
