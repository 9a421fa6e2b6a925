"""Policies are found by name, those of other packages too."""

import pytest
from foreign import run_beside

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
    code = (
        "import numpy as np\n"
        "from mlx_tq.config import EvictConfig\n"
        "from mlx_tq.evict.policy import Body, get_policy\n"
        "print(get_policy(EvictConfig(policy='odd')).score(Body([], np.array([4, 7, 8]), 9, 0)))"
    )
    assert run_beside(tmp_path, "mlx_tq.policies", "odd:Odd", FOREIGN_POLICY, code).strip() == "[0 1 0]"
