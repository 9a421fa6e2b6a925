"""The policy `recency`: the oldest tokens leave."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mlx_tq.policies.options import names_settings
from mlx_tq.policies.policy import Body, Policy


@names_settings
@dataclass(frozen=True, kw_only=True)
class Recency(Policy):
    """The newest tokens stay."""

    name: ClassVar[str] = "recency"
    segmented: ClassVar[bool] = False

    def score(self, body: Body) -> np.ndarray:
        """The position of each token."""
        return body.positions.astype(np.float64)
