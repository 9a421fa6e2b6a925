"""Servers on one folder: what one read the other goes on from, beside it and after it. The openai client asks."""

import pytest

from .conftest import PACKED, question
from .harness import running, together

STORED = (*PACKED, "--prefill-step-size", "64", "--prefix-cache")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("prefixes") / "store"


@pytest.fixture(scope="module")
def first(folder, path, tmp_path_factory):
    with running(folder, tmp_path_factory.mktemp("first") / "log", *STORED, path, key="one") as made:
        yield made


@pytest.fixture(scope="module")
def second(first, folder, path, tmp_path_factory):
    """A server on the same folder, as if after a restart."""
    with running(folder, tmp_path_factory.mktemp("second") / "log", *STORED, path, key="one") as made:
        yield made


def usage(answer):
    return answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens


def nearly_all(answer):
    """The store had all of a prompt but for a few tokens."""
    length, found = usage(answer)
    return length - 32 <= found < length


def test_another_server_on_the_folder(first, second, server):
    """Beside the first, alone and at once; with the text of a server without a store."""
    texts = [question(count, 100_000 + count) for count in (12, 14, 16)]
    plain = [server.chat(each).choices[0].message.content for each in texts]
    fresh = together([lambda each=each: first.chat(each) for each in texts])
    again = together([lambda each=each: second.chat(each) for each in texts])
    assert [each.choices[0].message.content for each in fresh] == plain
    assert [each.choices[0].message.content for each in again] == plain
    for each in again:
        assert nearly_all(each)
    longer = question(18, 593_847)
    first.chat(longer)
    stream = list(second.chat(longer, stream=True, stream_options={"include_usage": True}))
    assert nearly_all(stream[-1])
    asked, restored = map(sum, zip(*map(usage, [*again, stream[-1]]), strict=True))
    metrics = second.metrics()
    assert metrics["mlx_tq_restored_tokens_total"] == metrics["mlx_tq_cached_tokens_total"] == restored
    assert metrics["mlx_tq_read_tokens_total"] == asked - restored


def test_two_servers_write_at_once(first, second, server):
    """Who finds the folder in use stores later, or not; nobody waits for it."""
    texts = [f"Page {number}.\n{question(number, 500_000 + number)}" for number in (11, 13)]
    asked = [(each, text) for each in (first, second) for text in texts]
    said = together([lambda each=each, text=text: each.chat(text) for each, text in asked])
    plain = [server.chat(text).choices[0].message.content for text in texts]
    assert [answer.choices[0].message.content for answer in said] == 2 * plain
    assert not {word for each in (first, second) for word in ("Traceback", "WARNING") if word in each.log()}


def test_a_session_begins_where_another_servers_did(first, second):
    options = {"extra_headers": {"X-Session-Id": "a"}, "max_tokens": 12}
    said = "Weights and coins.\n" + question(13, 274_650)
    begun, again = (each.chat(said, **options) for each in (first, second))
    assert usage(begun)[1] < 64
    assert nearly_all(again)
    reply = again.choices[0].message.content
    assert reply == begun.choices[0].message.content == "274650"
    turn = ({"role": "user", "content": said}, {"role": "assistant", "content": reply})
    later = second.chat(*turn, "What is the access code?", **options)
    assert later.choices[0].message.content == reply


def test_another_key_finds_nothing(first, folder, path, tmp_path):
    asked = question(15, 118_822)
    said = first.chat(asked).choices[0].message.content
    with running(folder, tmp_path / "log", *STORED, path, key="two") as other:
        answer = other.chat(asked)
    assert usage(answer)[1] == 0
    assert answer.choices[0].message.content == said == "118822"
