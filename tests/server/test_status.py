"""What the server shows of its work, and clearing what it stores."""

import threading

import pytest
from http_harness import wait_for

from .conftest import ENDLESS, QUESTION
from .harness import read_first_text

MEMORY = ("--kv-memory-limit", "6MB")
SLOTS = ("--decode-concurrency", "1")
OBSTACLES = {
    SLOTS: "as many answers run as may run at once (--decode-concurrency 1)",
    MEMORY: "its KV cache needs ",
}


def status(server):
    (model,) = server.http.get("/status").json()["models"]
    return model["status"]


@pytest.mark.parametrize("flags", [SLOTS, pytest.param(MEMORY, marks=pytest.mark.full)], ids=["slots", "memory"])
def test_status_says_what_runs_and_why_others_wait(start, flags):
    server = start(*flags)
    assert (status(server)["running"], status(server)["waiting"], status(server)["hit_rate"]) == ([], [], None)
    stream = server.chat(QUESTION, stream=True, max_tokens=900, logit_bias=ENDLESS)
    read_first_text(stream)
    others = [threading.Thread(target=server.chat, args=[QUESTION], kwargs={"max_tokens": 700}) for _ in range(2)]
    for other in others:
        other.start()
    wait_for(lambda: [job["why"] for job in status(server)["waiting"]][1:] == ["an earlier request waits"], 60)
    wait_for(lambda: status(server)["waiting"][0]["why"] != "the current step", 60)
    wait_for(lambda: status(server)["running"][0]["generated"] > 0, 60)  # shown ten times a second
    shown = status(server)
    (running,) = shown["running"]
    assert running["prompt_tokens"] == running["prefilled"] == shown["waiting"][0]["prompt_tokens"] > 20
    assert 0 < running["generated"] < running["max_tokens"] == 900
    first, second = (job["why"] for job in shown["waiting"])
    assert first.startswith(OBSTACLES[flags])
    assert second == "an earlier request waits"
    stream.close()
    for other in others:
        other.join()
    wait_for(lambda: status(server)["running"] == [], 60)
    assert status(server)["hit_rate"] > 0.5


@pytest.mark.full
def test_what_is_stored_can_be_cleared(start):
    server = start()

    def ask():
        return server.chat(QUESTION, max_tokens=4).usage.prompt_tokens_details.cached_tokens

    first, again = ask(), ask()
    assert (first, again > 20) == (0, True)
    assert status(server)["stored_prompts"] > 0
    assert server.http.post("/cache/clear").json() == {"scheduler_cache_cleared": True}
    wait_for(lambda: status(server)["stored_prompts"] == 0, 60)
    assert status(server)["stored_bytes"] == 0
    assert ask() == 0
    assert status(server)["cached_tokens"] == again


@pytest.mark.full
def test_what_an_answer_would_take_is_estimated(start):
    server = start(*MEMORY)
    messages = [{"role": "user", "content": QUESTION}]

    def estimate(**body):
        answer = server.http.post("/v1/estimate", json=body)
        assert answer.status_code == 200, answer.text
        (report,) = answer.json()["prompts"]
        return report

    before = estimate(messages=messages, max_tokens=4)
    assert (before["fits"], before["refusal"], before["cached_tokens"]) == (True, None, 0)
    assert before["prefill_seconds"] is None, "nothing was prefilled yet"
    assert 0 < before["kv_bytes"] < 6e6
    usage = server.chat(QUESTION, max_tokens=4).usage
    after = estimate(messages=messages, max_tokens=4)
    assert after["prompt_tokens"] == before["prompt_tokens"] == usage.prompt_tokens
    assert after["cached_tokens"] == server.chat(QUESTION, max_tokens=4).usage.prompt_tokens_details.cached_tokens > 20
    longer = estimate(prompt=[100] * 2000, max_tokens=4)
    assert 0 < after["prefill_seconds"] < longer["prefill_seconds"] < 60
    large = estimate(prompt=[100] * 2000, max_tokens=40_000)
    assert (large["fits"], large["prompt_tokens"]) == (False, 2000)
    refused = server.post(path="/v1/completions", prompt=[100] * 2000, max_tokens=40_000)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == large["refusal"]
    assert server.http.post("/v1/estimate", json={"prompt": "a", "messages": 3}).status_code == 400
