"""Several requests at once: each gets the text that it gets alone, and all of them stay compressed."""

import threading
import time

import pytest

from .conftest import ENDLESS, PACKED, question
from .harness import running, together

STREAMS = 8
TOKENS = 24
PROMPTS = [question(2 + 2 * n, 104729 * (n + 1) % 900_000 + 100_000) for n in range(STREAMS)]


@pytest.fixture(scope="module")
def forgetful(folder, tmp_path_factory):
    """A server without a prompt cache: every prompt is read in full, alone and in company."""
    log = tmp_path_factory.mktemp("forgetful") / "log"
    with running(folder, log, *PACKED, "--prompt-cache-size", "0", "--prefill-step-size", "128") as made:
        yield made


def generate(server, prompt, stream):
    """Text that goes on to its limit, past the answer."""
    options = {"max_tokens": TOKENS, "logit_bias": ENDLESS}
    if not stream:
        answer = server.chat(prompt, **options)
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
        return answer.choices[0].message.content
    chunks = server.chat(prompt, stream=True, **options)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def watch(server, seen, done):
    """The fullest moment that /metrics shows."""
    while not done.is_set():
        metrics = server.metrics()
        now = metrics["mlx_tq_running"], metrics["mlx_tq_kv_fp16_bytes"], metrics["mlx_tq_kv_bytes"]
        seen.append(now)
        time.sleep(0.1)


def test_streams_at_once_are_each_alone(forgetful):
    alone = [generate(forgetful, prompt, stream=False) for prompt in PROMPTS]
    assert len(set(alone)) == STREAMS
    seen, done = [], threading.Event()
    watcher = threading.Thread(target=watch, args=(forgetful, seen, done))
    watcher.start()
    try:
        streamed = together([lambda p=prompt: generate(forgetful, p, stream=True) for prompt in PROMPTS])
    finally:
        done.set()
        watcher.join()
    assert streamed == alone
    count, native, compressed = max(seen)
    assert count == STREAMS
    assert native > compressed > 0  # capacity included, against the bare tokens in the model's type
    assert forgetful.metrics()["mlx_tq_prompt_cache_bytes"] == 0
