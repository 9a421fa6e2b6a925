"""A token for which the model has no embedding is refused: mlx would read memory behind the table."""

import pytest
from cli.tools import VOCABULARY, copy_model
from server.test_broken_answers import serving

from mlx_tq import Session, load
from mlx_tq.__main__ import main
from mlx_tq.errors import ConfigError

MARK = "<mark>"
SAYS = f"the prompt has the token {VOCABULARY:,}, but the model has embeddings only for tokens 0 to {VOCABULARY - 1:,}"


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """Return a checkpoint folder whose tokenizer has a token too many, with which its chat template begins."""
    tokenizer = load()[1]._tokenizer
    tokenizer.add_tokens([MARK])
    folder = copy_model(tmp_path_factory.mktemp("models") / "extended")
    tokenizer.chat_template = MARK + tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("words", [("generate",), ("cache_prompt", "--prompt-cache-file", "{folder}/file")])
def test_commands(extended, capsys, words):
    words = [word.format(folder=extended) for word in words]
    assert main([words[0], "--model", str(extended), "-p", "hi", *words[1:]]) == 2
    assert SAYS in capsys.readouterr().err


def test_a_session(extended):
    with Session(*load(extended)) as session, pytest.raises(ConfigError, match=SAYS):
        "".join(session.respond("hi"))


def test_the_server(extended):
    with serving(load(extended)) as (_, client):
        for path, body in (
            ("chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
            ("completions", {"prompt": f"a {MARK}"}),
            ("completions", {"prompt": [1, VOCABULARY]}),
        ):
            response = client.post(f"/v1/{path}", json={**body, "max_tokens": 2})
            assert (response.status_code, SAYS in response.text) == (400, True)
        assert client.post("/v1/completions", json={"prompt": "a mark", "max_tokens": 2}).status_code == 200
