"""Two servers with one prefix cache: each restores what the other prefilled."""

import pytest

from .conftest import PACKED, question
from .harness import running, together

STORED = (*PACKED, "--prefill-step-size", "64", "--prefix-cache")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("prefixes") / "store"


@pytest.fixture(scope="module")
def first(folder, path, tmp_path_factory):
    with running(folder, tmp_path_factory.mktemp("first") / "log", *STORED, path, key="one") as server:
        yield server


@pytest.fixture(scope="module")
def second(first, folder, path, tmp_path_factory):
    """A server on the same folder, as if after a restart."""
    with running(folder, tmp_path_factory.mktemp("second") / "log", *STORED, path, key="one") as server:
        yield server


def usage(answer):
    return answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens


def is_nearly_cached(answer):
    length, cached = usage(answer)
    return length - 32 <= cached < length


def test_another_server_restores_prompts_and_answers_the_same(first, second, server):
    texts = [question(count, 100_000 + count) for count in (12, 14, 16)]
    plain = [server.chat(text).choices[0].message.content for text in texts]
    fresh = together([lambda text=text: first.chat(text) for text in texts])
    again = together([lambda text=text: second.chat(text) for text in texts])
    assert [answer.choices[0].message.content for answer in fresh] == plain
    assert [answer.choices[0].message.content for answer in again] == plain
    for answer in again:
        assert is_nearly_cached(answer)
    longer = question(18, 593_847)
    first.chat(longer)
    stream = list(second.chat(longer, stream=True, stream_options={"include_usage": True}))
    assert is_nearly_cached(stream[-1])
    prompt_tokens, restored = map(sum, zip(*map(usage, [*again, stream[-1]]), strict=True))
    metrics = second.metrics()
    assert metrics["mlx_tq_restored_tokens_total"] == metrics["mlx_tq_cached_tokens_total"] == restored
    assert metrics["mlx_tq_prefill_tokens_total"] == prompt_tokens - restored


def test_two_servers_write_at_once(first, second, server):
    """A server that finds the folder in use stores later, or not; no answer waits for it."""
    texts = [f"Page {number}.\n{question(number, 500_000 + number)}" for number in (11, 13)]
    calls = [lambda server=server, text=text: server.chat(text) for server in (first, second) for text in texts]
    answers = together(calls)
    plain = [server.chat(text).choices[0].message.content for text in texts]
    assert [answer.choices[0].message.content for answer in answers] == 2 * plain
    logs = first.log() + second.log()
    assert "Traceback" not in logs
    assert "WARNING" not in logs


def test_a_session_restores_the_prompt_of_another_servers_session(first, second):
    options = {"extra_headers": {"X-Session-Id": "a"}, "max_tokens": 12}
    text = "Weights and coins.\n" + question(13, 274_650)
    fresh, again = (server.chat(text, **options) for server in (first, second))
    assert usage(fresh)[1] < 64
    assert is_nearly_cached(again)
    reply = again.choices[0].message.content
    assert reply == fresh.choices[0].message.content == "274650"
    turn = ({"role": "user", "content": text}, {"role": "assistant", "content": reply})
    later = second.chat(*turn, "What is the access code?", **options)
    assert later.choices[0].message.content == reply


def test_another_key_finds_nothing(first, folder, path, tmp_path):
    text = question(15, 118_822)
    content = first.chat(text).choices[0].message.content
    with running(folder, tmp_path / "log", *STORED, path, key="two") as other:
        answer = other.chat(text)
    assert usage(answer)[1] == 0
    assert answer.choices[0].message.content == content == "118822"
