"""A terminal shows the control characters of a model and does not obey them; files and pipes get them unchanged."""

import io
import json
import os

import pytest

from mlx_tq.cli.terminal_text import readable

from .tools import copy_model

ESCAPE = "\x1b"
QUESTION = f"The access code is {ESCAPE}17295. What is the access code?"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;title\x07", "␛]0;title␇"),
        ("a\rb\x00\x7f", "a␍b␀␡"),
        ("\x9b31m", "<U+009B>31m"),
        ("safe\u202efdp.exe\u2066", "safe<U+202E>fdp.exe<U+2066>"),
        ("a line\n\tand a tab, 日本語 👩\u200d💻 עברית\u200f", "a line\n\tand a tab, 日本語 👩\u200d💻 עברית\u200f"),
    ],
)
def test_readable(text, shown):
    assert readable(text) == shown


@pytest.fixture
def escaping(tmp_path):
    """The embedded model with ESC instead of the digit 4 in its vocabulary."""
    folder = copy_model(tmp_path / "model")
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["\u011b"] = vocabulary.pop("4")  # how byte-level tokenizers write the byte 1B
    file.write_text(json.dumps(tokenizer))
    return folder


@pytest.mark.full
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_model_does_not_steer_the_terminal(cli, start, escaping, command):
    flags = ("-p", QUESTION, "--verbose", "F") if command == "generate" else ()
    words = (command, "--model", escaping, *flags, "--max-tokens", "12")
    message = b"" if flags else QUESTION.encode()
    assert f"{ESCAPE}17295" in cli(*words, stdin=io.TextIOWrapper(io.BytesIO(message))).out

    ours, theirs = os.openpty()
    process = start(*words, stdin=-1, stdout=theirs)
    os.close(theirs)
    process.communicate(message)
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    assert "␛17295" in shown
    assert ESCAPE not in shown


def test_an_error_does_not_steer_the_terminal(cli, tmp_path):
    result = cli("generate", "-p", "hi", "--prompt-cache-file", tmp_path / f"{ESCAPE}]0;title")
    assert (result.code != 0, "␛]0;title" in result.err, ESCAPE in result.err) == (True, True, False)
