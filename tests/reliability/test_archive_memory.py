"""Archived tokens are on disk: a search reads a tile of them at a time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from archive_memory import ASKING, DIM, HEADS
from cli.tools import environment

from mlx_tq.prompt_cache.recall import TILE

PROGRAM = Path(__file__).with_name("archive_memory.py")
# Of a tile: packed keys as they are read and as mlx has them, decoded in two steps, and five arrays of scores.
STREAMED = TILE * HEADS * (2 * 2 * DIM + 2 * 4 * DIM + 5 * 4 * ASKING)


def figures(tokens, folder):
    env = environment(XDG_CACHE_HOME=str(folder), MALLOC_ARENA_MAX="2")
    words = [sys.executable, str(PROGRAM), str(tokens)]
    return json.loads(subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout)


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux says what of a process no file holds")
def test_fifty_thousand_archived_tokens_are_not_in_memory(tmp_path):
    none, many = (figures(tokens, tmp_path) for tokens in (0, 50_000))
    assert many["archived"] >= 50_000
    assert many["size"] > 3 * (many["live"] + STREAMED)  # held in memory, the bounds below would fail
    assert many["look"] <= STREAMED
    assert many["active"] - none["active"] <= many["live"] + STREAMED
    assert many["anonymous"] - none["anonymous"] <= many["live"] + STREAMED
    assert list((tmp_path / "mlx_tq").iterdir()) == []
