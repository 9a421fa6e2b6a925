"""The queue, disconnected clients, and signals, with one slot in the batch and one place in the queue."""

import signal
import threading

import httpx
import openai
import pytest
from http_harness import connections, post_bytes, wait_for
from processes import hangup_set_to

from .conftest import ENDLESS, PACKED, QUESTION, STEPS
from .harness import Server, read_first_text, together

LONG = {"max_tokens": 4000, "logit_bias": ENDLESS}


@pytest.fixture(scope="module")
def narrow(start):
    return start("--decode-concurrency", "1", "--max-queue", "1")


def idle(server):
    metrics = server.metrics()
    return metrics["mlx_tq_running"] == metrics["mlx_tq_waiting"] == 0


def occupy(server):
    """Return a stream that would run for minutes, after its first token."""
    stream = server.chat(QUESTION, stream=True, **LONG)
    read_first_text(stream)
    return stream


def test_a_full_queue_is_429(narrow):
    first = occupy(narrow)
    second = threading.Thread(target=narrow.chat, args=(QUESTION,))
    second.start()
    wait_for(lambda: narrow.metrics()["mlx_tq_waiting"] == 1)
    with pytest.raises(openai.RateLimitError, match="1 requests are waiting") as full:
        narrow.chat(QUESTION)
    assert full.value.code == "queue_full"
    assert full.value.response.headers["retry-after"] == "1"
    with pytest.raises(openai.RateLimitError):
        narrow.chat(QUESTION, stream=True)
    first.close()
    second.join()
    wait_for(lambda: idle(narrow))
    patient = openai.OpenAI(base_url=f"{narrow.url}/v1", api_key="none", max_retries=20)
    message = {"role": "user", "content": QUESTION}
    calls = [lambda: patient.chat.completions.create(model="default_model", messages=[message])] * 3
    assert [answer.choices[0].message.content for answer in together(calls)] == ["417295"] * 3
    patient.close()


def test_more_prompts_than_the_queue_holds_are_refused_for_good(narrow):
    with pytest.raises(openai.BadRequestError, match="prompt has 2 texts, of at most 1") as refused:
        narrow.openai.completions.create(model="default_model", prompt=["a", "b"], max_tokens=1)
    assert refused.value.param == "prompt"


def post_and_disconnect(server, wait):
    """Send a request without streaming, wait, and close the connection."""
    body = {"messages": [{"role": "user", "content": "hi"}], **LONG}
    with connections(server.url, 1, post_bytes("/v1/chat/completions", body)):
        wait()


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_disconnects_frees_its_slot(narrow, streamed):
    before = narrow.metrics()
    if streamed:
        occupy(narrow).close()
        assert narrow.chat(QUESTION).choices[0].message.content == "417295"
    else:
        post_and_disconnect(narrow, lambda: wait_for(lambda: narrow.metrics()["mlx_tq_running"] == 1))
    wait_for(lambda: idle(narrow))
    after = narrow.metrics()
    assert after["mlx_tq_generated_tokens_total"] - before["mlx_tq_generated_tokens_total"] < LONG["max_tokens"] / 2
    assert after["mlx_tq_disconnects_total"] == before["mlx_tq_disconnects_total"] + 1


def test_a_client_that_disconnects_in_the_queue_frees_its_place(narrow):
    first = occupy(narrow)
    before = narrow.metrics()["mlx_tq_disconnects_total"]
    post_and_disconnect(narrow, lambda: wait_for(lambda: narrow.metrics()["mlx_tq_waiting"] == 1))
    wait_for(lambda: narrow.metrics()["mlx_tq_disconnects_total"] == before + 1)
    second = threading.Thread(target=narrow.chat, args=(QUESTION,))
    second.start()  # a full queue would refuse it
    first.close()
    second.join()
    assert "mlx_tq_requests_total" in narrow.http.get("/metrics").text
    wait_for(lambda: idle(narrow))


def test_an_incomplete_body_costs_nothing(narrow):
    with connections(narrow.url, 1, post_bytes("/v1/chat/completions", {})[:-1]):
        pass
    assert narrow.chat(QUESTION).choices[0].message.content == "417295"


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.full)])
def test_a_signal_in_the_middle_of_a_stream(folder, tmp_path, number):
    with hangup_set_to(signal.SIG_DFL):
        server = Server(folder, tmp_path / "log", *PACKED, *STEPS, "--decode-concurrency", "1")
    try:
        stream = server.chat("hi", stream=True, max_tokens=4000, logit_bias=ENDLESS)
        assert next(iter(stream)).choices[0].delta.role == "assistant"
        server.process.send_signal(number)
        with pytest.raises(openai.APIError, match="stopping"):
            list(stream)
        assert server.process.wait(60) == 0
        with pytest.raises(httpx.ConnectError):
            server.http.get("/health")
        stream.close()
    finally:
        server.stop()
    assert "Traceback" not in server.log()


@pytest.mark.full
def test_a_signal_while_idle(folder, tmp_path):
    with hangup_set_to(signal.SIG_IGN):
        server = Server(folder, tmp_path / "log", *PACKED)
    server.process.send_signal(signal.SIGHUP)
    assert server.chat("hi", max_tokens=1).usage.completion_tokens == 1
    assert server.stop(signal.SIGINT) == 130
    assert "Traceback" not in server.log()
