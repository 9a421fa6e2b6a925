"""Recorded coding agents, with short made-up texts: their requests are accepted, and their prompts are reused."""

import json
import re

import httpx
import pytest

from benchmarks.agents.clients import Client
from benchmarks.agents.replay import TEMPLATE, Prompts, send
from benchmarks.agents.texts import TRACES, Texts, one_token_words, read_trace, requests_of
from mlx_tq.models import load

CLIENTS = sorted(path.stem for path in TRACES.glob("*.json"))
QUICK = ("claude-code", "codex", "qwen-code")  # one of each API
SHORT = 0.02  # of the recorded texts: all prompts fit into the embedded model's 4,095 positions

LAST = {"s1": 2, "s3": 1, "p2": 0}  # request of a session


@pytest.fixture(scope="module")
def agents_server(start):
    return start("--chat-template", TEMPLATE, "--max-tokens", 4)


@pytest.fixture(scope="module")
def agents_tokenizer(folder):
    return load(folder, tokenizer_config={"chat_template": TEMPLATE})[1]


def recorded(client, tokenizer, scale):
    """Yield the requests of a client, and whether each one continues the prompt of the one before it."""
    trace = read_trace(client)
    made = Client(trace, Texts(trace, one_token_words(tokenizer), scale), answer_tokens=4)
    tokens = {(session, number): record["tokens"] for session, number, record in requests_of(trace)}
    for session, number, record in requests_of(trace):
        continues = number > 0 and record["prefix"] == tokens[session, number - 1]
        yield made.request(session, number, record, "default_model"), continues


@pytest.mark.parametrize(
    "client", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in CLIENTS]
)
def test_requests_of_a_client(client, agents_server, agents_tokenizer):
    """Turns of a tool loop reuse the whole prompt before them, other sessions what they share with the first one."""
    prompts = Prompts(agents_tokenizer)
    with httpx.Client(base_url=agents_server.url, timeout=120) as http:
        for request, continues in recorded(client, agents_tokenizer, SHORT):
            if request.number > LAST.get(request.session, -1):
                continue
            shared, _ = prompts.add(request)
            tokens, cached, _ = send(http, request)
            assert tokens == prompts.lengths[-1], "the prompt that the template makes of the request"
            assert cached >= shared, f"{request.session} {request.number}"
            assert not continues or shared == prompts.lengths[-2]
            if (request.session, request.number) == ("p2", 0):  # its first line has another hash
                assert cached > tokens / 2


ERRORS = {  # of each route, for a prompt that is longer than the context
    "claude-code": lambda body: (body["type"], body["error"]["type"]) == ("error", "invalid_request_error"),
    "codex": lambda body: body["error"]["code"] == "context_length_exceeded",
    "qwen-code": lambda body: body["error"]["code"] == "context_length_exceeded",
}


@pytest.mark.parametrize("client", ERRORS)
def test_a_prompt_that_does_not_fit(client, agents_server, agents_tokenizer):
    """Clients compact the conversation when they read this error."""
    request, _ = next(recorded(client, agents_tokenizer, 1.0))
    response = agents_server.http.post(request.route, json=request.body, headers=request.headers)
    body = json.loads(response.text)
    assert response.status_code == httpx.codes.BAD_REQUEST
    assert ERRORS[client](body)
    assert re.search(r"prompt is too long: \d+ tokens > 4095 maximum", body["error"]["message"])
