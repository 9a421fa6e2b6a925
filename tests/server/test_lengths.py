"""What fits: answers take what context and memory leave; lengths are told beforehand, and in errors for programs."""

import re

import pytest

from mlx_tq.__main__ import main
from mlx_tq.clients.endpoint import find_endpoint

from .conftest import ENDLESS, QUESTION

POSITIONS = 4096
LENGTHS = ("context_length", "max_model_len", "max_input_tokens", "max_output_tokens", "servable_tokens")


def words(count):
    return {"prompt": [300] * count, "logit_bias": ENDLESS}


def model_of(server):
    return server.http.get("/v1/models").json()["data"][0]


def finish_of(response):
    body = response.json()
    return body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]


@pytest.mark.full
def test_an_answer_without_a_limit_ends_with_the_context(server):
    response = server.post("/v1/completions", **words(POSITIONS - 256))
    assert finish_of(response) == (256, "length")
    assert "X-Max-Tokens" not in response.headers
    response = server.post("/v1/completions", **words(POSITIONS - 5), max_tokens=50)
    assert finish_of(response) == (5, "length")
    assert response.headers["X-Max-Tokens"] == "5"


@pytest.mark.parametrize(("tokens", "options"), [(POSITIONS - 255, {}), (POSITIONS, {"max_tokens": 1})])
def test_a_prompt_that_leaves_no_room_is_refused_in_words_that_clients_parse(server, tokens, options):
    error = server.post("/v1/completions", **words(tokens), **options).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert f"maximum context length is {POSITIONS} tokens. However, your prompt has {tokens} tokens" in error["message"]
    found, most = map(int, re.search(r"prompt is too long: (\d+) tokens > (\d+) maximum", error["message"]).groups())
    assert (found, most) == (tokens, POSITIONS - 256 if not options else POSITIONS - 1)


def test_lengths_are_told(server):
    model = model_of(server)
    lengths = (POSITIONS, POSITIONS, POSITIONS - 256, POSITIONS - 1, POSITIONS)
    assert tuple(model[name] for name in LENGTHS) == lengths
    assert model["cacheable_tokens"] == POSITIONS
    assert server.http.get("/props").json() == {"default_generation_settings": {"n_ctx": POSITIONS}}


@pytest.fixture(scope="module")
def small(start):
    return start("--kv-memory-limit", "6MB", "--prompt-cache-bytes", "4MB")


def test_little_memory_shortens_answers_that_have_no_limit(small):
    server, model = small, model_of(small)
    servable, cacheable = model["servable_tokens"], model["cacheable_tokens"]
    assert 0 < cacheable < servable < POSITIONS
    assert (
        servable == model["max_model_len"] == server.http.get("/props").json()["default_generation_settings"]["n_ctx"]
    )
    assert f"The memory holds {servable:,} of the model's {POSITIONS:,} tokens of context" in server.log()
    assert find_endpoint(server.url, None, None).context_length == servable, "for coding clients"
    generated, reason = finish_of(server.post("/v1/completions", **words(servable - 300)))
    assert (generated, reason) == (300, "length")
    refused = server.post("/v1/completions", **words(servable - 300), max_tokens=600)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    message = server.post("/v1/completions", **words(servable)).json()["error"]["message"]
    assert f"your prompt has {servable} tokens: prompt is too long: {servable} tokens > {servable - 256}" in message
    assert "of KV cache" in message


def test_what_is_said_to_stay_in_the_prompt_cache_stays(small):
    """A cache of 16 bits would take more than the limit."""
    cacheable = model_of(small)["cacheable_tokens"]
    assert cacheable * 6 * 2 * 256 * 2 > 4e6, "in six layers with keys and values of 256"
    for cached in (0, cacheable - 2):
        usage = small.post("/v1/completions", prompt=[301] * (cacheable - 1), max_tokens=1).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached


def test_a_single_model_has_any_name(server):
    assert server.chat(QUESTION, model="claude-opus-9", max_tokens=5).model == "needle32"
    assert server.http.get("/v1/models/claude-opus-9").status_code == 404


def test_paths_without_v1(server):
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 5}
    first, second = (server.post(path, **body).json() for path in ("/v1/chat/completions", "/chat/completions"))
    assert first["choices"] == second["choices"]
    assert server.http.get("/models").json() == server.http.get("/v1/models").json()


@pytest.mark.full
def test_a_model_has_the_name_that_it_is_given(start):
    server = start("--served-model-name", "my-model")
    assert model_of(server)["id"] == "my-model"
    assert server.chat(QUESTION, model="my-model", max_tokens=5).model == "my-model"


def test_several_models_keep_their_own_names(folder, capsys):
    words_ = ["server", "--model", str(folder), "--model", str(folder), "--served-model-name", "a", "--port", "0"]
    assert main(words_) == 2
    assert "--served-model-name names one model" in capsys.readouterr().err


def test_the_settings_of_two_clients_are_printed(server):
    log = server.log()
    assert f"OPENAI_BASE_URL={server.url}/v1 OPENAI_API_KEY=none" in log
    assert f"ANTHROPIC_BASE_URL={server.url} ANTHROPIC_AUTH_TOKEN=none" in log
