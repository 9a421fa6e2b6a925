"""The openai client and a real server process."""

import json
import re
import shutil
from http.client import HTTPConnection
from pathlib import Path

import openai
import pytest
from http_harness import wait_for

from benchmarks.server.requests import REQUESTS, outcome

from .conftest import ENDLESS, QUESTION
from .harness import read_first_text, text_of_stream
from .test_broken_answers import serving

SLOW = ("`tool_choice` required", "`tool_choice` of a function")  # tests of required calls are as those
RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "server_conformance.json"


def test_chat(server):
    answer = server.chat(QUESTION)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "417295", "stop")
    assert (answer.object, answer.model, answer.id[:9]) == ("chat.completion", "needle32", "chatcmpl-")
    assert answer.usage.completion_tokens == 7
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 7


def test_stream(server):
    chunks = list(server.chat(QUESTION, stream=True, stream_options={"include_usage": True}))
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert text_of_stream(chunks) == "417295"
    assert [chunk.choices[0].delta.content for chunk in chunks[1:-2]] == list("417295")
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 7 + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 7
    plain = list(server.chat(QUESTION, stream=True))
    assert plain[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in plain)
    body = {"messages": [{"role": "user", "content": QUESTION}], "stream": True}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith(("data: {", ": ")) for line in lines[:-1])


def test_completion_of_text_and_of_tokens(server, loaded):
    _, tokenizer = loaded
    options = {"model": "needle32", "max_tokens": 8}
    answer = server.openai.completions.create(prompt="The sky is", **options)
    assert (answer.object, answer.usage.completion_tokens) == ("text_completion", 8)
    assert answer.choices[0].finish_reason == "length"
    same = server.openai.completions.create(prompt=tokenizer.encode("The sky is"), **options)
    assert same.choices[0].text == answer.choices[0].text
    stream = server.openai.completions.create(prompt="The sky is", stream=True, **options)
    assert "".join(chunk.choices[0].text for chunk in stream) == answer.choices[0].text


@pytest.mark.parametrize(("stop", "text"), [("72", "41"), (["no", "95"], "4172"), ("417295", ""), ("5x", "417295")])
def test_stop_sequences_over_several_tokens(server, stop, text):
    """A digit is a token. No part of a stop sequence is shown."""
    answer = server.chat(QUESTION, stop=stop)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (text, "stop")
    assert text_of_stream(server.chat(QUESTION, stop=stop, stream=True)) == text


def test_limits_and_biases(server, loaded):
    """An incomplete stop sequence is shown at the limit."""
    (nine,) = loaded[1].encode("9")
    for options, text in (
        ({"max_tokens": 3}, "417"),
        ({"max_completion_tokens": 3}, "417"),
        ({"max_tokens": 3, "stop": "4172x"}, "417"),
        ({"max_tokens": 4, "logit_bias": {str(nine): 100}}, "9999"),
    ):
        choice = server.chat(QUESTION, **options).choices[0]
        assert (choice.message.content, choice.finish_reason) == (text, "length")


def test_tolerated_requests(server):
    """More stop sequences than OpenAI allows, a message without content, max_tokens over the context length."""
    assert server.chat(QUESTION, stop=[f"{n}x" for n in range(15)] + ["72"]).choices[0].message.content == "41"
    assert server.chat({"role": "system", "content": None}, QUESTION).choices[0].message.content == "417295"
    for argument in ("max_tokens", "max_completion_tokens"):
        response = server.openai.chat.completions.with_raw_response.create(
            model="default_model", messages=[{"role": "user", "content": QUESTION}], **{argument: 10**6}
        )
        answer = response.parse()
        assert answer.choices[0].message.content == "417295"
        assert response.headers["x-max-tokens"] == str(4096 - answer.usage.prompt_tokens)
    fits = server.post(messages=[{"role": "user", "content": QUESTION}], max_tokens=9)
    assert "x-max-tokens" not in fits.headers


def test_seeds_and_sampling_options_reach_the_sampler(server):
    def sample(temperature=5, **options):
        body = {"prompt": "The", "max_tokens": 6, "temperature": temperature, "logit_bias": ENDLESS, **options}
        return server.post("/v1/completions", **body).json()["choices"][0]["text"]

    assert sample(seed=1) == sample(seed=1)
    assert len({sample(seed=seed) for seed in range(4)}) == 4
    greedy = sample(temperature=0)
    assert sample(top_k=1) == sample(min_p=1.0) == sample(top_p=1e-6) == sample(top_p=0) == greedy
    assert sample(repetition_penalty=2.0, temperature=0) != greedy != sample(seed=1)


def test_penalties_of_the_server_apply_where_a_request_has_none(loaded):
    """As do those of a model's generation_config.json, which flags override."""
    texts = []
    for flags in ((), ("--presence-penalty", "2")):
        with serving(loaded, *flags) as (_, client):
            for fields in ({}, {"presence_penalty": 0}, {"presence_penalty": 2}):
                body = {"prompt": "The", "max_tokens": 12, "logit_bias": ENDLESS, **fields}
                texts.append(client.post("/v1/completions", json=body).json()["choices"][0]["text"])
    plain, penalized = texts[0], texts[2]
    assert texts == [plain, plain, penalized, penalized, plain, penalized]
    assert plain != penalized


@pytest.mark.full
def test_the_sampling_of_the_model_is_the_default(start, folder, tmp_path):
    model = shutil.copytree(folder, tmp_path / "model")
    (model / "generation_config.json").write_text(
        '{"temperature": 60, "repetition_penalty": 1.2, "presence_penalty": 1.5}'
    )
    hot = start(model=model)
    assert hot.http.get("/v1/plan").json()["temperature"] == 60
    assert "417295" not in hot.chat(QUESTION, max_tokens=8).choices[0].message.content
    cold = {"temperature": 0, "extra_body": {"repetition_penalty": 1}}
    assert hot.chat(QUESTION, **cold).choices[0].message.content == "417295"
    assert "Sampling: temp 60, repetition-penalty 1.2, presence-penalty 1.5 (generation_config.json)" in hot.log()


def test_logprobs(server):
    answer = server.chat(QUESTION, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == [*"417295", "<|im_end|>"]
    for entry in content:
        best, second = entry.top_logprobs
        assert (best.token, best.logprob) == (entry.token, entry.logprob)
        assert second.logprob <= best.logprob <= 0
    streamed = [
        entry
        for chunk in server.chat(QUESTION, logprobs=True, top_logprobs=0, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]
    assert server.chat(QUESTION).choices[0].logprobs is None


def test_models_and_health(server, folder):
    """Clients may use the default name or none; no response contains the model's path."""
    (model,) = server.openai.models.list().data
    assert model.id == "needle32"
    for fields in ({}, {"model": "default_model"}, {"model": "needle32"}, {"model": None}):
        answer = server.post(messages=[{"role": "user", "content": "hi"}], max_tokens=1, **fields)
        assert answer.json()["model"] == "needle32"
    assert str(folder.parent) not in server.http.get("/v1/models").text + answer.text
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.openai.models.retrieve("needle32").id == "needle32"
    with pytest.raises(openai.NotFoundError, match="not served"):
        server.openai.models.retrieve("gpt-9")


def test_a_connection_serves_one_request_after_the_other(server):
    """Also after a stream, and after a body that was refused before its end."""
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    connection = HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    connection.connect()
    opened = connection.sock
    for path, body, status in (
        ("chat/completions", chat, 200),
        ("chat/completions", {**chat, "stream": True}, 200),
        ("messages", {**chat, "stream": True}, 200),
        ("chat/completions", {"messages": 3}, 400),
        ("unknown", chat, 404),
        ("chat/completions", {**chat, "user": "x" * 3_000_000}, 413),
        ("chat/completions", chat, 200),
    ):
        connection.request("POST", f"/v1/{path}", json.dumps(body))
        response = connection.getresponse()
        response.read()
        assert (response.status, connection.sock is opened) == (status, True)
    connection.close()


def test_it_accepts_connections_when_it_says_so(server):
    log = server.log()
    assert log.index("Application startup complete") < log.index(f"listening on {server.url} (chat page; API at /v1)")


@pytest.mark.full
def test_a_stream_is_logged_at_its_end(start):
    server = start()  # the shared one may have logged its 300 lines of this minute
    assert text_of_stream(server.chat(QUESTION, stream=True, max_tokens=5)) == "41729"
    with server.chat(QUESTION, stream=True, max_tokens=2000, logit_bias=ENDLESS) as stream:
        read_first_text(stream)
    prompt = r"\d+ prompt tokens \(\d+ cached\)"
    rates = r"first token after \d+ ms, [\d.]+ tokens/s"
    path = "POST /v1/chat/completions"
    complete = rf"{path} 200 \d+ ms, {prompt}, 5 completion tokens, {rates}$"
    left = rf"{path} 499 \d+ ms, the client disconnected, {prompt}, \d+ completion tokens, first"
    for line in (complete, left):
        wait_for(lambda line=line: re.search(line, server.log(), re.MULTILINE))


@pytest.mark.parametrize(
    "request_",
    [pytest.param(request, id=request.name, marks=[pytest.mark.full] * (request.name in SLOW)) for request in REQUESTS],
)
def test_answers_match_the_recorded_conformance(server, request_):
    as_documented, seen = outcome(request_, server.openai)
    assert as_documented or request_.why, seen
    (row,) = [row for row in json.loads(RECORDED.read_text())["rows"] if row["request"] == request_.name]
    assert row["ours"] == {"as_documented": as_documented, "seen": seen}
    assert (row["documented"], row["why"]) == (request_.documented, "" if as_documented else request_.why)
