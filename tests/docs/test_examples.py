"""The programs of examples/ say what they lack."""

import sys

import pytest

from .pages import ROOT, run


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("-S", "openai_client.py"), "needs openai"),
        (("long_document.py",), "usage:"),
        (("long_document.py", "nowhere.txt", "Who?"), "No such file or directory: 'nowhere.txt'"),
        (("long_document.py", ".", "Who?"), "Is a directory: '.'"),
        (("long_document.py", sys.executable, "Who?"), "codec can't decode"),
        (("long_document.py", str(ROOT / "docs" / "reference" / "flags.md"), "Who?"), "tokens would fit"),
        (("chat.py", "/nowhere"), "there is no model folder '/nowhere'"),
    ],
)
def test_an_example_that_lacks_something_says_what(words, says):
    """-S: without the packages that are installed."""
    done = run([sys.executable, *words], ROOT / "examples")
    assert (done.returncode, says in done.stderr, "Traceback" in done.stderr) == (2, True, False)
