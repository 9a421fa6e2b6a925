"""The programs of examples/ do what they are for, or say what they lack."""

import re
import sys

import pytest
from cli.tools import float32_model

from .pages import ROOT, run


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("-S", "openai_client.py"), "needs openai"),
        (("long_document.py",), "usage:"),
        (("long_document.py", "nowhere.txt", "Who?"), "No such file or directory: 'nowhere.txt'"),
        (("long_document.py", ".", "Who?"), "Is a directory: '.'"),
        (("long_document.py", sys.executable, "Who?"), "codec can't decode"),
        (("long_document.py", str(ROOT / "docs" / "reference" / "flags.md"), "Who?"), "positions are free"),
        (("chat.py", "/nowhere"), "there is no model folder '/nowhere'"),
    ],
)
def test_an_example_that_lacks_something_says_what(words, says):
    """-S: without the packages that are installed."""
    done = run([sys.executable, *words], ROOT / "examples")
    assert (done.returncode, says in done.stderr, "Traceback" in done.stderr) == (2, True, False)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "as it is"])
def test_the_chat_evicts_and_recalls_the_code(tmp_path, dtype):
    words = [float32_model(tmp_path / "needle32")] if dtype == "float32" else []
    done = run([sys.executable, "chat.py", *words], ROOT / "examples")
    assert done.returncode == 0, done.stderr
    answer, statistics = done.stdout.splitlines()[-2:]
    assert answer == "417295"
    assert re.fullmatch(r"\d+ tokens in the cache, [1-9]\d* evicted, [\d.]+ MB", statistics)


@pytest.mark.full  # it reads a document of thousands of tokens
def test_a_question_about_a_long_document(tmp_path):
    houses = [f"House {number} has {number % 7} trees and a gate. " for number in range(80)]
    document = tmp_path / "document.txt"
    document.write_text("".join([*houses[:20], "The access code is 417295. ", *houses[20:]]))
    done = run([sys.executable, "long_document.py", document, "What is the access code?"], ROOT / "examples")
    assert done.returncode == 0, done.stderr
    answer, statistics = done.stdout.splitlines()
    assert answer == "417295"
    assert re.fullmatch(r"[1-9]\d* tokens recalled, \d+ quoted", statistics)
