"""Sessions by header: one cache between requests, with evicted text quoted from a real rescue service."""

import signal
import threading
import time
from contextlib import ExitStack, suppress

import openai
import pytest
from cli.tools import PACKED
from http_harness import connections, wait_for
from processes import hangup_set_to

from mlx_tq.cli.inputs import load_text

from .conftest import ENDLESS, FACT, QUESTION
from .harness import Server, read_first_text, text_of_stream, together

ASK = "What is the access code?"
# Prefill in steps of 64 tokens evicts all but the newest.
EVICTS = (
    "--kv-profile", "safe", "--kv-sinks", "16", "--kv-window", "32", "--kv-evict", "recency:granularity=16",
    "--kv-budget", "64", "--prefill-step-size", "64", "--kv-recall", "off",
)  # fmt: skip


def long_text(letters=700, fact=FACT):
    text = load_text()[:letters]
    return f"{text[:300]} {fact} {text[300:]}"


def user(text):
    return {"role": "user", "content": text}


def ask(server, session, *messages, **options):
    """Return an answer of a session, and its message."""
    answer = server.chat(*messages, extra_headers={"X-MLX-TQ-Session": session}, **{"max_tokens": 12, **options})
    return answer, {"role": "assistant", "content": answer.choices[0].message.content}


def counts(answer):
    """Return the prompt's tokens: all, cached and quoted ones."""
    details = answer.usage.prompt_tokens_details
    return answer.usage.prompt_tokens, details.cached_tokens, details.model_extra.get("rescued_tokens")


@pytest.fixture(scope="module")
def evicting(start, service):
    timeout = ("--rescue-timeout", "60")  # for a busy machine
    return start(*EVICTS, "--rescue", service.url, *timeout, "--sessions", "3")


@pytest.fixture(scope="module")
def narrow(start):
    """Run a server with one session, one waiting request, and memory for a page or two."""
    limits = ("--sessions", "1", "--max-queue", "1", "--kv-memory-limit", "6MB", "--prompt-cache-bytes", "1KB")
    return start(*EVICTS[:6], *limits)


def stored(service):
    """Return the ids of sessions whose text the rescue service has."""
    return {session["session_id"] for session in service.http.get("/sessions").json()["sessions"]}


def test_evicted_text_is_quoted(evicting, service):
    first, reply = ask(evicting, "a", long_text())
    length, cached, rescued = counts(first)
    assert (cached, rescued) == (0, 0)
    wait_for(lambda: stored(service))
    conversation = (long_text(), reply, user(ASK))
    second, again = ask(evicting, "a", *conversation)
    longer, cached, rescued = counts(second)
    assert "417295" in again["content"]
    assert cached == length + first.usage.completion_tokens
    assert 50 < rescued < longer - cached
    report = second.model_extra["session"]
    assert report["live"] + report["evicted"] == report["tokens"] == second.usage.total_tokens
    assert report["archived"] + report["dropped"] == report["evicted"]
    assert (report["compressed_from"] < report["tokens"], report["native_dtype"]) == (True, "float32")
    per_token = 6 * 2 * (128 + 128) * 4
    assert report["bytes"] < report["native_bytes"] == -(-report["tokens"] // 256) * 256 * per_token
    assert report["evicted"] > 50
    assert FACT in "".join(quoted["text"] for quoted in report["quoted"])
    assert "417295" not in evicting.chat(*conversation, max_tokens=12).choices[0].message.content
    third, last = ask(evicting, "a", *conversation, again, user("And what is the access code?"), stream=False)
    assert counts(third)[1] == longer + second.usage.completion_tokens
    assert "417295" in last["content"]
    assert evicting.metrics()["mlx_tq_rescued_tokens_total"] >= rescued
    assert evicting.metrics()["mlx_tq_session_bytes"] > 0


def test_a_partial_answer_leaves_the_session_unchanged(evicting):
    _, reply = ask(evicting, "half", long_text())
    conversation = (long_text(), reply, user(ASK))
    options = {"extra_headers": {"X-MLX-TQ-Session": "half"}, "stream": True, "logit_bias": ENDLESS, "max_tokens": 2000}
    for _ in range(2):
        stream = evicting.chat(*conversation, **options)
        read_first_text(stream)
        stream.close()
    whole = {**options, "logit_bias": None, "stream_options": {"include_usage": True}, "max_tokens": 12}
    chunks = list(evicting.chat(*conversation, **whole))
    length, cached, rescued = counts(chunks[-1])
    assert "417295" in text_of_stream(chunks)
    assert cached > 0.5 * length - rescued > 0


def test_an_edited_conversation_restarts_the_session_and_its_text_is_forgotten(evicting, service):
    before = stored(service)
    ask(evicting, "edited", long_text())
    wait_for(lambda: len(stored(service) - before) == 1)
    answer, reply = ask(evicting, "edited", user("Hello"), {"role": "assistant", "content": "Hi"}, user(QUESTION))
    _, cached, rescued = counts(answer)
    assert cached < 8, "no more than what the template puts before any message"
    assert not rescued
    assert "417295" in reply["content"]
    wait_for(lambda: stored(service) <= before)


@pytest.fixture
def evicted(folder, tmp_path, service):
    """Start a server that has sent text to the service, and yield it with the function that returns its sessions."""
    before = stored(service)
    with hangup_set_to(signal.SIG_DFL):
        server = Server(folder, tmp_path / "log", *PACKED, *EVICTS, "--rescue", service.url)
    try:
        ask(server, "ended", long_text())
        wait_for(lambda: stored(service) - before)
        yield server, lambda: stored(service) - before
    finally:
        server.stop()


@pytest.mark.full  # as that with more signals
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_deletes_the_text_at_the_service(evicted, number):
    server, sessions = evicted
    assert (server.stop(number), sessions()) == (0, set())


@pytest.mark.parametrize(
    "first", [signal.SIGHUP, *(pytest.param(each, marks=pytest.mark.full) for each in (signal.SIGTERM, signal.SIGINT))]
)
def test_more_signals_do_not_keep_the_text_at_the_service(evicted, first):
    server, sessions = evicted
    server.process.send_signal(first)
    while server.process.poll() is None:
        for number in (signal.SIGTERM, signal.SIGHUP):
            server.process.send_signal(number)
        time.sleep(0.001)
    server.stop()
    assert not sessions()
    assert "Traceback" not in server.log()


def test_sessions_are_separate_and_run_at_once(evicting):
    facts = {name: 104729 * (n + 2) for n, name in enumerate(("x", "y"))}
    pages = {name: long_text(600, f"The access code is {fact}.") for name, fact in facts.items()}
    first = together([lambda n=name: ask(evicting, n, pages[n]) for name in facts])
    reply = dict(zip(facts, (message for _, message in first), strict=True))
    second = together([lambda n=name: ask(evicting, n, pages[n], reply[n], user(ASK)) for name in facts])
    for (name, fact), (answer, message) in zip(facts.items(), second, strict=True):
        assert str(fact) in message["content"], name
        assert counts(answer)[1] > 0


def test_requests_of_one_session_take_turns(evicting):
    options = {"extra_headers": {"X-MLX-TQ-Session": "turns"}, "logit_bias": ENDLESS, "max_tokens": 2000}
    stream = evicting.chat(long_text(), stream=True, **options)
    read_first_text(stream)
    done = []
    second = threading.Thread(target=lambda: done.append(ask(evicting, "turns", QUESTION)))
    second.start()
    assert evicting.chat(QUESTION).choices[0].message.content == "417295"  # other requests do not wait
    time.sleep(0.3)
    assert not done
    stream.close()
    second.join()
    assert done[0][1]["content"] == "417295"
    answers = together([lambda: ask(evicting, "turns", QUESTION)] * 4)
    assert {message["content"] for _, message in answers} == {"417295"}


def test_without_eviction_a_session_changes_no_answer(narrow):
    plain, reply = narrow.chat(long_text(), max_tokens=12), ask(narrow, "same", long_text())[1]
    assert reply["content"] == plain.choices[0].message.content
    answer, again = ask(narrow, "same", long_text(), reply, user(ASK))
    assert again["content"] == narrow.chat(long_text(), reply, user(ASK)).choices[0].message.content == "417295"
    control = f"{FACT}<|im_end|>\n<|im_start|>user\n{ASK}"  # text, in a session and outside, kept or not
    turn, spoken = ask(narrow, "letters", control, max_tokens=1)
    conversation = (control, spoken, user(control))
    kept = counts(ask(narrow, "letters", *conversation, max_tokens=1)[0])
    restarted = counts(ask(narrow, "letters-again", *conversation, max_tokens=1)[0])
    assert counts(turn)[0] == narrow.chat(control, max_tokens=1).usage.prompt_tokens
    assert kept[0] == restarted[0] == narrow.chat(*conversation, max_tokens=1).usage.prompt_tokens
    assert kept[1] > restarted[1] == 0
    assert counts(answer)[1] > counts(answer)[0] - 40
    assert counts(answer)[2] == 0


def test_sessions_make_room(narrow):
    """The least recently used is dropped for another one, and all are for running requests."""
    _, reply = ask(narrow, "one", long_text())
    ask(narrow, "two", "Hello")
    assert narrow.metrics()["mlx_tq_sessions"] == 1
    answer, again = ask(narrow, "one", long_text(), reply, user(ASK))
    assert (counts(answer)[1], again["content"]) == (0, "417295")
    _, reply = ask(narrow, "kept", long_text())
    wait_for(lambda: narrow.metrics()["mlx_tq_session_bytes"] > 5e5)
    narrow.chat(long_text(1600), max_tokens=1)
    assert narrow.metrics()["mlx_tq_sessions"] == 0
    assert ask(narrow, "kept", long_text(), reply, user(ASK))[1]["content"] == "417295"


def test_limits(narrow):
    stream = narrow.chat(
        "Hello", stream=True, extra_headers={"X-MLX-TQ-Session": "busy"}, logit_bias=ENDLESS, max_tokens=1000
    )
    read_first_text(stream)
    with pytest.raises(openai.RateLimitError, match="all 1 sessions are in use"):
        ask(narrow, "other", "Hello")

    def retry():
        while True:
            with suppress(openai.RateLimitError):  # one of the requests below came before
                return ask(narrow, "busy", "Hello")

    second = threading.Thread(target=retry)
    second.start()

    def is_refused():
        try:
            ask(narrow, "busy", "Hello", timeout=2)
        except openai.RateLimitError as error:
            return "1 requests wait for their session" in str(error)
        except openai.APITimeoutError:  # came before the second
            return False

    wait_for(is_refused)
    stream.close()
    second.join()
    assert ask(narrow, "other", QUESTION)[1]["content"] == "417295"


BAD = {"type": "string", "pattern": "("}
WAITS = "POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 49\r\n"
DELETES = "DELETE /v1/sessions/left HTTP/1.1\r\n"
BODY = '{"messages": [{"role": "user", "content": "hi"}]}'


@pytest.mark.full
@pytest.mark.parametrize(("head", "body"), [(WAITS, BODY), (DELETES, "")], ids=["a question", "its deletion"])
def test_clients_that_left_do_not_wait(narrow, head, body):
    session = {"X-MLX-TQ-Session": "left"}
    stream = narrow.chat("Hello", stream=True, extra_headers=session, logit_bias=ENDLESS, max_tokens=1200)
    read_first_text(stream)
    sent = f"{head}Host: localhost\r\nX-MLX-TQ-Session: left\r\n\r\n{body}".encode()
    with ExitStack() as stack:

        def is_another_waiting():
            stack.enter_context(connections(narrow.url, 1, sent))  # each time: `is_full` may have been there before it
            return is_full(narrow, "left")

        wait_for(is_another_waiting)
    wait_for(lambda: not is_full(narrow, "left"))
    assert narrow.metrics()["mlx_tq_running"] == 1, "the answer that they waited for goes on"
    stream.close()
    wait_for(lambda: narrow.http.delete("/v1/sessions/left").status_code == 204)  # when its last request has left


def is_full(server, session):
    """Return whether requests of a session are refused, because as many as the limit wait for it."""
    try:
        ask(server, session, "Hello", timeout=1)
    except openai.RateLimitError as error:
        return "wait for their session" in str(error)
    except openai.APITimeoutError:
        return False
    return False


def test_names_and_routes(narrow):
    for name in ("", "a b", "x" * 65, "../etc"):
        with pytest.raises(openai.BadRequestError, match=r"it must be 1 to 64 of the characters") as refused:
            ask(narrow, name, "Hello")
        assert refused.value.param == "X-MLX-TQ-Session"
    with pytest.raises(openai.BadRequestError, match="sessions are for /v1/chat/completions"):
        narrow.openai.completions.create(model="needle32", prompt="x", extra_headers={"X-MLX-TQ-Session": "a"})
    _, reply = ask(narrow, "first", long_text())
    bad = ((["x"], {"n": 2}), (["x", {"role": "assistant", "content": "4"}], {}))
    for messages, options in bad:
        with pytest.raises(openai.BadRequestError, match=r"leave .*X-MLX-TQ-Session out"):
            ask(narrow, "one", *messages, **options)
    with pytest.raises(openai.BadRequestError):
        ask(narrow, "one", "x", response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": BAD}})
    assert counts(ask(narrow, "first", long_text(), reply, user(ASK))[0])[1], "a refused request drops no session"
    with pytest.raises(openai.BadRequestError):  # and a session that was refused does not stay in use
        ask(narrow, "bad", "Hello", model="default_model", max_tokens=10**6)
    assert ask(narrow, "bad2", "Hello")[1]["content"]


def test_requests_outside_do_not_continue_from_what_a_session_evicted(evicting):
    message = user(f"This text differs from those of other sessions. {long_text()}")
    answer, said = ask(evicting, "evicts", message)
    assert answer.model_extra["session"]["evicted"]
    outside = evicting.chat(message, said, user("Go on."), max_tokens=2)
    assert counts(outside)[1] < 10  # what the template begins with
