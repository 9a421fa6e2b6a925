"""The real openai client against a real server process."""

import json

import openai
import pytest

from .conftest import ENDLESS, question

ASKED = "The access code is 417295. What is the access code?"


def text_of(stream):
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def test_chat(server):
    answer = server.chat(ASKED)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "417295", "stop")
    assert (answer.object, answer.model) == ("chat.completion", "needle32")
    assert answer.usage.completion_tokens == 7
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 7


def test_stream(server):
    chunks = list(server.chat(ASKED, stream=True, stream_options={"include_usage": True}))
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert text_of(chunks) == "417295"
    assert [chunk.choices[0].delta.content for chunk in chunks[1:-2]] == list("417295")
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 7 + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 7


def test_a_stream_without_usage_ends_with_its_reason(server):
    chunks = list(server.chat(ASKED, stream=True))
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks)


def test_the_lines_of_a_stream(server):
    with server.http.stream(
        "POST", "/v1/chat/completions", json={"messages": [{"role": "user", "content": ASKED}], "stream": True}
    ) as response:
        lines = [line for line in response.iter_lines() if line]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert lines[-1] == "data: [DONE]"
    data = [line.removeprefix("data: ") for line in lines[:-1] if line.startswith("data: ")]
    assert all(json.loads(line)["object"] == "chat.completion.chunk" for line in data)
    assert all(line.startswith(("data: ", ": ")) for line in lines)


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


def test_max_tokens(server):
    for name in ("max_tokens", "max_completion_tokens"):
        answer = server.chat(ASKED, **{name: 3})
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("417", "length")


@pytest.mark.parametrize(("stop", "left"), [("72", "41"), (["no", "95"], "4172"), ("417295", ""), ("5x", "417295")])
def test_stop_texts_over_several_tokens(server, stop, left):
    """Digits are tokens of their own, so these texts lie across tokens; none is shown, not even its beginning."""
    answer = server.chat(ASKED, stop=stop)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (left, "stop")
    assert text_of(server.chat(ASKED, stop=stop, stream=True)) == left


def test_a_beginning_of_a_stop_text_is_kept_at_the_limit(server):
    assert server.chat(ASKED, stop="4172x", max_tokens=3).choices[0].message.content == "417"


def test_seed(server):
    def sample(seed):
        answer = server.openai.completions.create(
            model="needle32", prompt="The", max_tokens=12, temperature=1.5, seed=seed, logit_bias=ENDLESS
        )
        return answer.choices[0].text

    assert sample(1) == sample(1)
    assert len({sample(seed) for seed in range(4)}) == 4


def test_sampling_options_reach_the_sampler(server):
    def sample(**options):
        extra = {name: options.pop(name) for name in ("top_k", "min_p") if name in options}
        answer = server.openai.completions.create(
            model="needle32", prompt="The", max_tokens=12, temperature=5, seed=1, extra_body=extra, **options
        )
        return answer.choices[0].text

    greedy = server.openai.completions.create(model="needle32", prompt="The", max_tokens=12).choices[0].text
    assert sample(top_k=1) == sample(min_p=1.0) == sample(top_p=1e-6) == greedy
    assert sample() != greedy


def test_logit_bias(server, loaded):
    _, tokenizer = loaded
    (nine,) = tokenizer.encode("9")
    assert server.chat(ASKED, logit_bias={str(nine): 100}, max_tokens=4).choices[0].message.content == "9999"


def test_logprobs(server):
    answer = server.chat(ASKED, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == [*"417295", "<|im_end|>"]
    for entry in content:
        best, second = entry.top_logprobs
        assert (best.token, best.logprob) == (entry.token, entry.logprob)
        assert second.logprob <= best.logprob <= 0
    streamed = [
        entry
        for chunk in server.chat(ASKED, logprobs=True, top_logprobs=0, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]
    assert server.chat(ASKED).choices[0].logprobs is None


def test_models(server):
    (model,) = server.openai.models.list().data
    assert model.id == "needle32"
    assert server.openai.models.retrieve("needle32").id == "needle32"
    with pytest.raises(openai.NotFoundError, match="not served"):
        server.openai.models.retrieve("gpt-9")


def test_nothing_tells_where_the_model_is(server, folder):
    said = server.http.get("/v1/models").text + server.chat(ASKED).model_dump_json()
    assert str(folder.parent) not in said


def test_a_long_question(server):
    assert server.chat(question(20, 860341)).choices[0].message.content == "860341"


def test_health(server):
    assert server.http.get("/health").json() == {"status": "ok"}
