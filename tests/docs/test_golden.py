"""The golden runs: what is recorded is what runs answer now, every difference has its reason, and README shows it."""

import json
import subprocess
import sys

import mlx.core as mx
import pytest

from benchmarks.golden.compare import HERE, Difference, Reason, changes, differences, explained, recorded
from benchmarks.golden.reasons import CODE

from .pages import README, ROOT, blocks


@pytest.mark.skipif(mx.default_device() == mx.gpu, reason="they were recorded on a CPU")
def test_two_cheap_runs_are_as_recorded():
    """To three digits of the log-probabilities: another CPU may round otherwise."""
    for start in ("library llama balanced single", "library glm4 triattention single"):
        words = [sys.executable, str(HERE / "library.py"), start, "today"]
        done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT, timeout=120)
        name, found = json.loads(done.stdout)
        expected = dict(recorded("today")[name])
        assert found.pop("logprob") == pytest.approx(expected.pop("logprob"), rel=1e-3)
        found["plan"] = [" ".join(line.split()) for line in found["plan"]]
        assert differences(expected, found, name) == []


def test_a_difference_needs_a_reason_and_a_reason_a_difference():
    found = changes("before", "then")
    assert all(explained(found, CODE).values())
    with pytest.raises(ValueError, match="1 differences without a reason, reasons without one: \\[\\]"):
        explained([*found, Difference("library llama / tokens", '"1 2"', '"1 3"')], CODE)
    with pytest.raises(ValueError, match="reasons without one: \\['never'\\]"):
        explained(found, [*CODE, Reason("never", "it cannot be", "nowhere")])


def test_readme_shows_what_the_demo_says():
    shown = next(block.code for block in blocks(README) if block.code.startswith("KV cache"))
    assert [line.split() for line in shown.splitlines()] == [
        line.split() for line in recorded("today")["demo"][0]["out"]
    ]
