"""mlx-lm's tests of its own server (tests/test_server.py there), where they apply, on the same requests.

Left out: those of its classes (LRUPromptCache, TextStateMachine, samplers), which are used here as they are, and those
of draft models, which cannot run in a batch.
"""

import pytest

CHAT = {"model": "default_model", "max_tokens": 10, "temperature": 0.7, "top_p": 0.85, "repetition_penalty": 1.2}
ADD = {"type": "function", "id": "123", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
CONVERSATIONS = {
    "plain": [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Hello!"},
    ],
    "content fragments": [
        {"role": "system", "content": [{"type": "text", "text": "You are a helpful assistant."}]},
        {"role": "user", "content": [{"type": "text", "text": "Hello!"}]},
    ],
    "null tool content": [
        {"role": "user", "content": "what is 2+3?"},
        {"role": "assistant", "content": None, "tool_calls": [ADD]},
        {"role": "tool", "content": "5", "tool_call_id": "123"},
    ],
}


def test_handle_completions(server):
    body = {
        "model": "default_model", "prompt": "Once upon a time", "max_tokens": 10, "temperature": 0.5, "top_p": 0.9,
        "repetition_penalty": 1.1, "repetition_context_size": 20, "seed": 999, "stop": "stop sequence",
    }  # fmt: skip
    answers = [server.post("/v1/completions", **body).json() for _ in range(2)]
    assert answers[0]["id"] != answers[1]["id"]
    assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"] != ""


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_handle_chat_completions(server, name):
    answer = server.post(**CHAT, messages=CONVERSATIONS[name]).json()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert 0 < answer["usage"]["completion_tokens"] <= 10


def test_fragments_are_the_text_that_they_make(server):
    counts = [
        server.post(**CHAT, messages=CONVERSATIONS[name]).json()["usage"]["prompt_tokens"]
        for name in ("plain", "content fragments")
    ]
    assert counts[0] == counts[1]


def test_handle_models(server):
    body = server.http.get("/v1/models").json()
    assert body["object"] == "list"
    (model,) = body["data"]
    assert model["object"] == "model"
    assert {"id", "created"} <= set(model)


def test_the_default_model_has_a_name(server):
    """mlx-lm's clients may leave it out, or say default_model."""
    for model in ({}, {"model": "default_model"}, {"model": "needle32"}, {"model": None}):
        response = server.post(messages=CONVERSATIONS["plain"], max_tokens=1, **model)
        assert response.json()["model"] == "needle32"
