"""The server and the client that README.md shows, as it shows them."""

import re
import subprocess
import sys

import pytest
from cli.tools import ROOT, environment

from mlx_tq.models import embedded_path

from .harness import running

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_client_of_the_readme(tmp_path):
    (flags,) = re.findall(r"^mlx_tq\.server(.*)$", README, re.MULTILINE)
    (script,) = re.findall(r"^python (examples/\S+)$", README, re.MULTILINE)
    with running(embedded_path(), tmp_path / "log", *flags.split()) as server:
        done = subprocess.run(
            [sys.executable, script],
            cwd=ROOT,
            env=environment(OPENAI_BASE_URL=f"{server.url}/v1"),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("417295 ")
    cached = [int(re.search(r"(\d+) of them cached", line)[1]) for line in (first, second)]
    assert cached[0] == 0 < cached[1]


@pytest.mark.parametrize(
    ("words", "says"), [(("-S", "openai_client.py"), "needs openai"), (("long_document.py",), "usage:")]
)
def test_an_example_that_lacks_something_says_what(words, says):
    """-S: without the packages that are installed."""
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT / "examples", env=environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, says in done.stderr, "Traceback" in done.stderr) == (2, True, False)
