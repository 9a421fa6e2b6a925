"""Several models in one server: loaded on request, unloaded to make room."""

import asyncio
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from cli.tools import EMBEDDED, float32_model, zoo_model
from http_harness import polled, wait_for

from mlx_tq.server.api_errors import UnavailableError
from mlx_tq.server.model_pool import ModelPool, PooledModel
from mlx_tq.server.sessions import HEADER

from .conftest import ENDLESS, PACKED, QUESTION
from .harness import read_first_text, running, together

CACHES = 20_000_000  # bytes for each model
SPLIT = "split-00001-of-00002.gguf"  # whose other part is large


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Make a folder of three models, two too large ones and a damaged one; only the first knows the answer."""
    folder = tmp_path_factory.mktemp("models")
    float32_model(folder / "alpha")
    zoo_model(folder / "beta", "llama", max_position_embeddings=1000)
    text = {"max_position_embeddings": 100}  # which mlx-lm's qwen3 does not read
    zoo_model(folder / "gamma", "qwen3", max_position_embeddings=2000, text_config=text)
    large = zoo_model(folder / "large", "llama") / "model.safetensors"
    os.truncate(large, 10**9)  # a sparse file, which nothing reads
    (folder / "zeta.gguf").write_bytes(b"GGUF")
    for part in (1, 2):
        (folder / f"split-0000{part}-of-00002.gguf").write_bytes(b"GGUF")
    os.truncate(folder / "split-00002-of-00002.gguf", 10**9)
    (folder / "notes.txt").write_text("no model")
    return folder


def weights(model):
    return (model / "model.safetensors").stat().st_size


def limits(*models):
    """Return flags with which these models fit together, and no others with them."""
    total = sum(weights(model) + CACHES for model in models) + 1_000_000
    return ("--kv-memory-limit", f"{CACHES / 1e6}MB", "--model-memory-limit", f"{total / 1e6}MB")


def loaded(server):
    return [model["id"] for model in server.http.get("/v1/models").json()["data"] if model["loaded"]]


def waiting(server, model):
    return server.metrics()[f'mlx_tq_waiting_for_model{{model="{model}"}}']


def ask(server, model, **options):
    """Return the name of the model that answered; the default model must know the answer."""
    answer = server.chat(QUESTION, model=model, max_tokens=8, **options)
    assert (answer.choices[0].message.content == "417295") == (answer.model == "alpha")
    return answer.model


def test_a_model_is_loaded_when_it_is_named(start, models):
    server = start(model=models)
    listed = server.http.get("/v1/models").json()["data"]
    assert [(model["id"], model["loaded"], model["context_length"]) for model in listed] == [
        ("alpha", True, 4096), ("beta", False, 1000), ("gamma", False, 2000), ("large", False, 4096),
        (SPLIT, False, None), ("zeta.gguf", False, None),
    ]  # fmt: skip
    assert all(model["owned_by"] == "mlx_tq" and model["created"] > 0 for model in listed)
    assert ask(server, "default_model") == ask(server, "alpha") == "alpha"
    assert server.post("/api/show", model="beta").json()["capabilities"] == ["completion"]
    assert loaded(server) == ["alpha"], "front ends ask for each model that is listed"
    assert ask(server, "beta") == "beta"
    assert loaded(server) == ["alpha", "beta"]
    assert server.http.get("/v1/models/beta").json()["loaded"]
    assert server.http.get("/v1/plan").json()["model"] == "alpha"
    assert server.http.get("/v1/plan", params={"model": "gamma"}).json()["model"] == "gamma"
    assert loaded(server) == ["alpha", "beta", "gamma"]
    for path in (str(models / "beta"), "../beta", "delta", "mlx-community/Qwen3-4B-4bit"):
        with pytest.raises(openai.NotFoundError, match=rf"has alpha, beta, gamma, large, {SPLIT}, zeta\.gguf"):
            ask(server, path)


@pytest.fixture(scope="module")
def narrow(start, models):
    """Run a server with room for the first model alone, or for the two small ones."""
    return start(*limits(models / "alpha"), "--max-queue", "8", model=models)


def test_a_model_that_cannot_be_loaded(narrow, models):
    server = narrow
    for _ in range(2):
        for name in ("large", SPLIT):
            with pytest.raises(openai.InternalServerError, match=rf"{name} needs 1.02 GB .* Raise --model"):
                ask(server, name)
        with pytest.raises(openai.InternalServerError, match=r"'zeta\.gguf' cannot be loaded") as failed:
            ask(server, "zeta.gguf")
        assert failed.value.status_code == 503
        assert str(models) not in str(failed.value)
    assert "cannot load zeta.gguf" in server.log()
    assert (ask(server, "beta"), ask(server, "alpha")) == ("beta", "alpha")
    assert server.http.get("/health").status_code == 200


def test_a_load_that_panics_blocks_no_other():
    class Panic(BaseException):
        pass

    def load():
        raise Panic("no merges")

    async def ask_for_both():
        pool = ModelPool([PooledModel(name, load) for name in ("a", "b")])
        for name in ("a", "b"):
            with pytest.raises(UnavailableError, match=f"'{name}' cannot be loaded; see the server's log"):
                await asyncio.wait_for(pool.acquire(name), 10)

    asyncio.run(ask_for_both())


@pytest.mark.full
def test_an_idle_model_is_unloaded_and_comes_back(start, models):
    """Not while it has a session."""
    server = start("--idle-release", "0.02", model=models / "alpha")
    assert ask(server, "alpha") == "alpha"
    wait_for(lambda: loaded(server) == [], 60)
    assert server.http.get("/health").json() == {"status": "ok"}
    wait_for(lambda: "unloaded alpha" in server.log(), 60)
    headers = {HEADER: "s"}
    answer = server.http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": QUESTION}]}, headers=headers
    )
    assert answer.status_code == 200
    time.sleep(3)
    assert loaded(server) == ["alpha"]
    assert server.http.delete("/v1/sessions/s").status_code == 204
    wait_for(lambda: loaded(server) == [], 60)


@pytest.mark.full
def test_the_least_recently_used_model_makes_room(start, models):
    server = start(*limits(models / "alpha", models / "beta"), model=models)
    for model in ("beta", "alpha", "gamma"):
        assert ask(server, model) == model
    assert loaded(server) == ["alpha", "gamma"]
    before = server.metrics()
    assert before['mlx_tq_generated_tokens_total{model="alpha"}'] > 0
    assert ask(server, "beta") == "beta"
    assert loaded(server) == ["beta", "gamma"]
    after = server.metrics()
    assert before["mlx_tq_memory_bytes"] - after["mlx_tq_memory_bytes"] > 0.8 * weights(models / "alpha")
    assert after['mlx_tq_prompt_cache_bytes{model="alpha"}'] == 0 < before['mlx_tq_prompt_cache_bytes{model="alpha"}']
    assert ask(server, "alpha") == "alpha"
    again = server.metrics()['mlx_tq_generated_tokens_total{model="alpha"}']
    assert again > before['mlx_tq_generated_tokens_total{model="alpha"}']


def test_requests_for_models_that_do_not_fit_together_take_turns(narrow):
    ask(narrow, "alpha")
    names = ["alpha", "beta", "gamma", "beta"]
    with polled(narrow, "/health"):
        assert together([lambda name=name: ask(narrow, name) for name in names]) == names
    assert loaded(narrow) == ["alpha"] or "alpha" not in loaded(narrow)


@pytest.mark.full
def test_a_model_that_answers_is_not_unloaded(narrow):
    ask(narrow, "alpha")
    stream = narrow.chat(QUESTION, stream=True, max_tokens=4000, logit_bias=ENDLESS)
    read_first_text(stream)
    answers, threads = [], []
    for name in ("beta", "alpha"):  # the later ones wait too, so that the other model's turn comes
        threads += [threading.Thread(target=lambda name=name: answers.append(ask(narrow, name))) for _ in range(4)]
        for thread in threads[-4:]:
            thread.start()
        wait_for(lambda name=name: waiting(narrow, name) == 4)
    assert loaded(narrow) == ["alpha"]
    with pytest.raises(openai.RateLimitError, match="8 requests wait for their model, the limit"):
        ask(narrow, "gamma")
    next(stream)
    stream.close()
    for thread in threads:
        thread.join()
    assert answers == 4 * ["beta"] + 4 * ["alpha"]


@pytest.mark.full
def test_a_session_starts_again_when_its_model_was_unloaded(narrow):
    turns = [{"role": "user", "content": QUESTION}]

    def turn():
        answer = narrow.chat(*turns, extra_headers={"X-MLX-TQ-Session": "a"})
        turns.append({"role": "assistant", "content": answer.choices[0].message.content})
        turns.append({"role": "user", "content": "What is the access code?"})
        return answer.usage.prompt_tokens_details.cached_tokens

    assert turn() < turn()
    assert ask(narrow, "beta") == "beta"
    assert turn() == 0 < turn()
    assert turns[-2]["content"] == "417295"
    assert "unloaded alpha, and ended its sessions" in narrow.log()
    assert narrow.http.delete("/v1/sessions/a").status_code == 204


@pytest.fixture
def slow(tmp_path):
    """Make a model that loads until the returned function is called."""
    pipe = zoo_model(tmp_path / "slow", "llama") / "generation_config.json"
    os.mkfifo(pipe)

    def finish():
        with pipe.open("w") as stream:  # when the server has opened it to read
            (tmp_path / "file").write_text("{}")
            (tmp_path / "file").replace(pipe)  # for whoever reads it again
            stream.write("{}")

    finish.model = pipe.parent
    return finish


@pytest.mark.full
def test_others_are_served_while_a_model_is_loaded(start, models, slow):
    server = start("--model", slow.model, "--model", models / "beta", model=models / "alpha")
    names = []
    threads = [threading.Thread(target=lambda name=name: names.append(ask(server, name))) for name in ("slow", "beta")]
    threads[0].start()
    wait_for(lambda: "loading slow" in server.log())
    threads[1].start()
    wait_for(lambda: waiting(server, "beta") == 1)
    assert ask(server, "alpha") == "alpha"
    assert server.http.get("/health").status_code == 200
    assert loaded(server) == ["alpha"]
    slow()
    for thread in threads:
        thread.join()
    assert sorted(names) == ["beta", "slow"]


@pytest.mark.full
def test_a_signal_while_a_model_is_loaded(models, slow, tmp_path):
    with running(models / "alpha", tmp_path / "log", *PACKED, "--model", slow.model) as server:
        with ThreadPoolExecutor() as pool:
            request = pool.submit(ask, server, "slow")
            wait_for(lambda: "loading slow" in server.log())
            server.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.InternalServerError, match="the server is stopping"):
            request.result()
        assert server.process.wait(60) == 0
        assert "Traceback" not in server.log()


@pytest.mark.full
def test_a_model_that_is_larger_than_its_file(start, models):
    sizes = ("--kv-memory-limit", f"{CACHES / 1e6}MB", "--model-memory-limit", "40MB", "--dtype", "float32")
    server = start(*sizes, "--model", EMBEDDED, model=models / "beta")
    for _ in range(2):
        with pytest.raises(openai.InternalServerError, match=r"needle needs 4.* MB for its weights and KV caches"):
            ask(server, "needle")
    assert server.log().count("loading needle") == 1
    assert ask(server, "beta") == "beta"
