"""A server of several ranks answers as one process does."""

import signal
from contextlib import contextmanager

import pytest
from cli.tools import EMBEDDED, environment, facts
from cli.tools import command as words_of
from http_harness import wait_for
from rescue.harness import Server as RescueService
from server.conftest import ENDLESS
from server.harness import running, together
from server.test_sessions import EVICTS, ask, counts, long_text, user

from .together import hostfile


def chats(server):
    """Return answers of concurrent chats (streamed, n=2 with a stop text, abandoned)."""
    texts = ["".join(facts(count)) for count in (20, 40, 60)]
    calls = [lambda text=text: server.chat(text, max_tokens=16) for text in texts]
    calls.append(lambda: server.chat(texts[0], max_tokens=16, n=2, stop="7"))
    calls.append(lambda: leave(server.chat(texts[1], max_tokens=3000, stream=True, logit_bias=ENDLESS)))
    *found, left = together(calls)
    chunks = server.chat(texts[2], max_tokens=16, stream=True)
    said = [[choice.message.content for choice in each.choices] for each in found]
    said.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))
    wait_for(lambda: not server.metrics()["mlx_tq_running"])
    assert server.metrics()["mlx_tq_disconnects_total"] == 1
    return [*said, left]


def answers(server):
    """Return answers of concurrent chats, then those of a session."""
    said = chats(server)
    _, first = ask(server, "a", long_text())
    second, again = ask(server, "a", long_text(), first, user("What is the access code?"))
    third, last = ask(server, "a", long_text(), first, user("What is the access code?"), again, user("Say it again."))
    assert all(counts(each)[1] > 0 for each in (second, third))
    return [*said, first, again, last, counts(second), counts(third)]


def leave(stream):
    """Disconnect after the first text."""
    found = next(chunk for chunk in stream if chunk.choices[0].delta.content)
    stream.close()
    return found.choices[0].delta.content


@contextmanager
def ranks_running(popen, folder, *flags):
    """Run a server of two ranks, and yield the first one; both end when it is interrupted."""
    hosts = str(hostfile(folder / "hosts.json", 2))
    first, second = ({"MLX_HOSTFILE": hosts, "MLX_RANK": str(rank)} for rank in range(2))
    with (folder / "second.log").open("w") as log:
        other = popen(words_of("server", "--model", EMBEDDED, *flags), env=environment(**second), stderr=log)
    with running(EMBEDDED, folder / "first.log", *flags, **first) as server:
        yield server
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) in (0, 130)
    assert other.wait(60) == 0, (folder / "second.log").read_text()


@pytest.mark.full
@pytest.mark.parametrize("recall", ["off", "64"])
def test_a_server_of_ranks_answers_as_one_process(tmp_path, popen, recall):
    """The spans of the rescue service are quoted as text, or recalled as rows on all ranks."""
    service = RescueService(tmp_path / "data", embedder="none")
    flags = ("--dtype", "float32", *EVICTS, "--kv-recall", recall, "--prefill-step-size", "2048")
    flags = (*flags, "--rescue", service.url, "--rescue-timeout", "60")
    with running(EMBEDDED, tmp_path / "alone.log", *flags) as alone:
        expected = answers(alone)
    assert "417295" in expected[-4]["content"]
    with ranks_running(popen, tmp_path, *flags) as server:
        assert answers(server) == expected
        assert server.http.get("/v1/plan").json()["plan"]["ranks"] == 2
    assert service.stop() == 0


@pytest.mark.full
def test_a_server_of_ranks_continues_from_a_prefix_cache(tmp_path, popen):
    """Without eviction, for prefixes that include evicted tokens are not stored."""
    flags = ("--dtype", "float32", *EVICTS[:6], "--prefix-cache", str(tmp_path / "store"), "--prefill-step-size", "64")
    found, restored = [], []
    for name in ("first", "again"):
        (tmp_path / name).mkdir()
        with ranks_running(popen, tmp_path / name, *flags) as server:
            found.append(chats(server))
            restored.append(server.metrics()["mlx_tq_restored_tokens_total"])
    assert found[0] == found[1]
    assert restored[0] < restored[1]
    points = [tmp_path / "store" / f"rank-{rank}-of-2" / "checkpoints" for rank in range(2)]
    assert len(list(points[0].iterdir())) == len(list(points[1].iterdir())) > 0
