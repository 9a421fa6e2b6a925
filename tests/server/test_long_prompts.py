"""Too long texts are refused before they are tokenized, and large requests do not delay small ones."""

import asyncio
import json
import re
import shutil
import time
from threading import Event

import pytest

from mlx_tq import Session
from mlx_tq.__main__ import main
from mlx_tq.cli.inputs import load_text
from mlx_tq.errors import ConfigError
from mlx_tq.server.api_errors import QueueFullError
from mlx_tq.server.guard import LargeRequests, default_max_body
from mlx_tq.session.text import PromptLengthLimit

from .harness import together

POSITIONS, LONGEST_TOKEN = 4096, 14  # of the embedded model
FITS = POSITIONS * LONGEST_TOKEN
MANY_POSITIONS = 200_000


@pytest.fixture(scope="module")
def long_context_server(start, folder, tmp_path_factory):
    large = shutil.copytree(folder, tmp_path_factory.mktemp("models") / "large")
    config = json.loads((large / "config.json").read_text())
    (large / "config.json").write_text(json.dumps({**config, "max_position_embeddings": MANY_POSITIONS}))
    return start(model=large)


def user(text):
    return [{"role": "user", "content": text}]


def test_a_text_that_is_too_long_is_not_tokenized(long_context_server):
    """It would take 10 s and delay short requests."""
    text = "0123456789" * 400_000
    requests = [
        ("/v1/chat/completions", {"messages": user(text)}, {}),
        ("/v1/chat/completions", {"messages": user(text)}, {"X-MLX-TQ-Session": "a"}),
        ("/v1/chat/completions", {"messages": [*user("hi"), {"role": "assistant", "content": text}]}, {}),
        ("/v1/completions", {"prompt": text}, {}),
        ("/v1/responses", {"input": text}, {}),
    ]
    started = time.monotonic()
    for path, body, headers in requests:
        response = long_context_server.http.post(path, json=body, headers=headers)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        least = int(re.search(r"at least (\d+) tokens", error["message"])[1])
        assert len(text) / LONGEST_TOKEN < least < len(text) / LONGEST_TOKEN + 50, "the template adds some"
        assert error["param"] in body
    assert time.monotonic() - started < 10


@pytest.mark.full
def test_with_little_memory_short_prompts_are_answered_and_long_ones_refused(start):
    """Prefill in the steps of 2,048 tokens that are the default would not fit."""
    server = start("--memory", "57MB", "--context", "1000", "--prompt-concurrency", "1", steps=())
    assert re.search(r"--kv-profile small fits \(.* during prefill in steps of (512|256)\)", server.log())
    response = server.post(messages=user(load_text()[:12_000]), max_tokens=1)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "of KV cache" in response.json()["error"]["message"]
    assert server.post(messages=user(load_text()[:2000]), max_tokens=1).status_code == 200
    assert server.http.get("/health").status_code == 200


@pytest.mark.full
def test_long_and_short_requests_at_once(long_context_server):
    """Texts that pass the check but have too many tokens, which takes seconds to find out."""
    long_context_server.post(messages=user("hi"), max_tokens=1)

    def short():
        time.sleep(0.3)
        started = time.monotonic()
        assert long_context_server.post(messages=user("hi"), max_tokens=1).status_code == 200
        return time.monotonic() - started

    def long():
        return long_context_server.post("/v1/completions", prompt="7" * 600_000, max_tokens=1).json()["error"]["code"]

    *refused, seconds = together([long, long, short])
    assert refused == ["context_length_exceeded"] * 2
    assert seconds < 2


def test_large_requests_are_prepared_one_at_a_time():
    """Others queue, up to 8 MB in total; a failed request frees its share."""
    active, counts = [0], []

    def prepare(number):
        active[0] += 1
        counts.append(active[0])
        time.sleep(0.05)
        active[0] -= 1
        if number == 1:
            raise ValueError("no such prompt")
        return number

    async def run():
        large_requests = LargeRequests()
        runs = [large_requests.run(2**22, prepare, number) for number in range(3)]
        results = await asyncio.gather(*runs, return_exceptions=True)
        return [*results, await large_requests.run(10**9, prepare, 4)]

    first, failed, refused, alone = asyncio.run(run())
    assert (first, alone, set(counts)) == (0, 4, {1})
    assert isinstance(failed, ValueError)
    assert isinstance(refused, QueueFullError)


@pytest.mark.parametrize("nbytes", [100, 2**20], ids=["small", "large"])
def test_a_cancelled_request_ends_with_its_thread(nbytes):
    """The thread cannot be stopped. Until it has ended, its request keeps its turn and its session."""
    has_begun, may_end, order = Event(), Event(), []

    def prepare():
        has_begun.set()
        may_end.wait(60)
        order.append("prepared")
        raise ValueError("no such prompt")

    async def run():
        request = asyncio.create_task(LargeRequests().run(nbytes, prepare))
        request.add_done_callback(lambda _: order.append("ended"))
        await asyncio.to_thread(has_begun.wait, 60)
        request.cancel()
        await asyncio.wait({request}, timeout=0.2)
        may_end.set()
        await asyncio.wait({request})
        return request.cancelled()

    assert asyncio.run(run())
    assert order == ["prepared", "ended"]


def test_a_large_request_that_waits_is_cancelled_at_once():
    may_end, prepared = Event(), []

    async def run():
        large_requests = LargeRequests()
        first = asyncio.create_task(large_requests.run(2**20, may_end.wait, 60))
        waiting = asyncio.create_task(large_requests.run(2**20, prepared.append, 1))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        may_end.set()
        return await first

    assert asyncio.run(run())
    assert not prepared


def test_the_largest_body_depends_on_the_context_length(server, long_context_server):
    body = {"messages": user("a" * 3_000_000), "max_tokens": 1}
    assert server.post(**body).status_code == 413
    assert long_context_server.post(**body).status_code == 400
    assert [default_max_body(positions) for positions in (4096, 131_072, None)] == [2_000_000, 2**22, 10_000_000]


def test_the_limit_counts_the_longest_token(embedded):
    limit = PromptLengthLimit(embedded[1], 10)
    limit.check(10 * LONGEST_TOKEN)
    limit.check(8 * LONGEST_TOKEN, used=2)
    with pytest.raises(ConfigError, match=r"the message has 141 characters; at most 140 fit"):
        limit.check(10 * LONGEST_TOKEN + 1, "message")
    with pytest.raises(ConfigError, match=r"context of 10 tokens \(2 in use\).*\(reset\)"):
        limit.check(8 * LONGEST_TOKEN + 1, used=2)
    PromptLengthLimit(embedded[1], None).check(10**9)


def test_cli_and_session_reject_long_text(embedded, folder, tmp_path, capsys):
    text = "0123456789" * 900_000
    file = tmp_path / "prompt.txt"
    file.write_text(text)
    started = time.monotonic()
    for words in (["generate"], ["cache_prompt", "--prompt-cache-file", str(tmp_path / "cache.safetensors")]):
        assert main([*words, "--model", str(folder), "--prompt-file", str(file)]) == 2
        assert f"at most {FITS:,} fit" in capsys.readouterr().err
    with Session(*embedded) as session, pytest.raises(ConfigError, match="the message has 9,000,000 characters"):
        next(session.respond(text))
    with pytest.raises(ConfigError, match="the system prompt has 9,000,000 characters"):
        Session(*embedded, system_prompt=text)
    assert time.monotonic() - started < 15
