"""The policy `random`, the control of every measurement: any token leaves."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mlx_tq.policies.options import names_settings, option
from mlx_tq.policies.policy import Body, Policy


@names_settings
@dataclass(frozen=True, kw_only=True)
class Random(Policy):
    """Tokens leave at random.

    Attributes:
        seed: of the random numbers.
    """

    name: ClassVar[str] = "random"

    seed: int = option(0, least=0)

    def score(self, body: Body) -> np.ndarray:
        """Uniform in [0, 1), from the seed and the round."""
        return np.random.default_rng((self.seed, body.round)).random(len(body.positions))
