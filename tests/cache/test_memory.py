"""Memory really is what the caches declare: no hidden copy in the model's type, and one layer of scratch at a time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROBE = Path(__file__).with_name("memory_probe.py")
ROOT = PROBE.parents[2]
ROW = {("q8", "tq4"): 196, ("tq4", "tq4"): 132}  # bytes of a packed token, head dim 128


def measure(*arguments):
    """What a fresh process saw at each length."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, str(PROBE), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    return json.loads(run.stdout)


@pytest.mark.parametrize("formats", ROW, ids="-".join)
def test_active_memory_grows_by_the_declared_bytes(formats):
    """From 4K to 16K tokens. Keys and values in fp16 would take 512 bytes a token."""
    layers = 3
    short, long = measure(layers, *formats, 16, 4096, 16384)
    declared = long["declared"] - short["declared"]
    assert declared == layers * 12288 * ROW[formats]
    assert 0.99 * declared <= long["active"] - short["active"] <= 1.1 * declared
    assert long["active"] <= 1.1 * long["declared"] + 200_000  # rotations, and the random state


def test_prefill_holds_the_scratch_of_one_layer():
    """Scores, the decoded past and its rotated neighbours are gone before the next layer makes its own.

    Derived for one layer of fp32: scores and their softmax, [2, 512, S] each, and three copies of keys and values,
    [1, S, 128] each: blocks of them decoded, side by side with the rotated tail, and one in hand.
    """
    tokens = 2048
    (few,), (many,) = (measure(layers, "q8", "tq4", 512, tokens) for layers in (2, 6))
    scores, past = 2 * 512 * tokens * 4, 2 * tokens * 128 * 4
    assert many["peak"] <= 2 * scores + 3 * past
    assert many["peak"] <= 1.1 * few["peak"]
