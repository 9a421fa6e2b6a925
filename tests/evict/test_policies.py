"""Policies are found by name, those of other packages too."""

import subprocess
import sys
from pathlib import Path

import pytest

from mlx_tq.config import EvictConfig
from mlx_tq.errors import ConfigError
from mlx_tq.evict.policy import get_policy, policy_names

FOREIGN_POLICY = """
from mlx_tq.evict.policy import Policy

class Odd(Policy):
    name = "odd"

    def score(self, body):
        return body.positions % 2
"""


def test_all_by_name():
    assert set(policy_names()) >= {"triattention", "random", "recency", "streaming", "knorm"}
    for name in policy_names():
        assert get_policy(EvictConfig(policy=name)).name == name
    with pytest.raises(ConfigError, match=r"policy 'best' is unknown; valid are .*triattention"):
        get_policy(EvictConfig(policy="best"))


def test_a_policy_of_another_package_is_found(tmp_path):
    """In a process of its own: an installed distribution with an entry point, and nothing imported by hand."""
    (tmp_path / "foreign_policy.py").write_text(FOREIGN_POLICY)
    info = tmp_path / "foreign_policy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign-policy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mlx_tq.policies]\nodd = foreign_policy:Odd\n")
    code = (
        f"import sys; sys.path[:0] = {[str(tmp_path), str(Path(__file__).parents[2])]}\n"
        "import numpy as np\n"
        "from mlx_tq.config import EvictConfig\n"
        "from mlx_tq.evict.policy import Body, get_policy\n"
        "print(get_policy(EvictConfig(policy='odd')).score(Body([], np.array([4, 7, 8]), 9, 0)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[0 1 0]"
