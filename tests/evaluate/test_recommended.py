"""The profiles of the code are those that the measured table supports."""

import json
from pathlib import Path

import pytest

from mlx_tq.config import PROFILES

ROOT = Path(__file__).parents[2]
ROWS = {
    row["name"]: row
    for name in ("all_formats", "spectral", "mixed")
    for row in json.loads((ROOT / f"benchmarks/results/quality_{name}.json").read_text())["results"].values()
}


@pytest.mark.parametrize("name", ["safe", "balanced", "small"])
def test_no_smaller_pair_diverges_less(name):
    chosen = ROWS[f"{PROFILES[name].key}/{PROFILES[name].value}"]
    better = [row["name"] for row in ROWS.values() if row["nbytes"] <= chosen["nbytes"] and row["kld"] < chosen["kld"]]
    assert not better
