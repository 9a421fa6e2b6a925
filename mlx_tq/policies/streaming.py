"""The policy `streaming`: the oldest tokens leave, but for the first four.

Source: Xiao et al., Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mlx_tq.policies.options import names_settings
from mlx_tq.policies.policy import Body, Policy

SINKS = 4


@names_settings
@dataclass(frozen=True, kw_only=True)
class Streaming(Policy):
    """The first four tokens (attention sinks) and the newest stay; with a sinks of 4 or more it is `recency`."""

    name: ClassVar[str] = "streaming"
    segmented: ClassVar[bool] = False

    def score(self, body: Body) -> np.ndarray:
        """The position of each token, or infinity for a sink."""
        return np.where(body.positions < SINKS, np.inf, body.positions.astype(np.float64))
