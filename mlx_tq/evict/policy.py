"""What an eviction policy is: a dataclass found by name that says what each token of the packed bodies is worth.

Policies of this package are in `baselines` and `triattention`. Other packages add theirs, a subclass of `Policy` with a
name, through the entry-point group `mlx_tq.policies`.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import ClassVar

import mlx.core as mx
import numpy as np

from mlx_tq.codec.rows import RowLayout
from mlx_tq.config import EvictConfig
from mlx_tq.errors import ConfigError
from mlx_tq.evict.queries import QueryStats
from mlx_tq.evict.rope import Rope

ENTRY_POINTS = "mlx_tq.policies"
_MODULES = ("mlx_tq.evict.baselines", "mlx_tq.evict.triattention")


@dataclass(frozen=True)
class PackedLayer:
    """The body of one layer.

    Attributes:
        rows: uint32 [1, H, capacity, W]; those past the body's tokens are unused.
        layout: of the rows.
        rope: of the layer, where the policy needs queries.
        queries: their statistics, where the policy needs them.
    """

    rows: mx.array
    layout: RowLayout
    rope: Rope | None = None
    queries: QueryStats | None = None


@dataclass(frozen=True)
class Body:
    """The packed tokens of all layers of one sequence; every layer holds the same ones.

    Attributes:
        layers: of the model that mlx_tq compresses.
        positions: of the tokens, ascending, int64 [S].
        length: tokens seen; the position of the next one.
        round: how many rounds went before.
    """

    layers: Sequence[PackedLayer]
    positions: np.ndarray
    length: int
    round: int


@dataclass(frozen=True)
class Policy(ABC):
    """Says what tokens are worth.

    Attributes:
        name: under which it is found.
        needs_queries: it needs the calibrated queries and the RoPE of each layer.
        segmented: it leaves the choice to the modes of `selection`; else the worst of all leave.
        config: the options.
    """

    name: ClassVar[str]
    needs_queries: ClassVar[bool] = False
    segmented: ClassVar[bool] = True
    config: EvictConfig

    @abstractmethod
    def score(self, body: Body) -> np.ndarray:
        """The worth of each token, high for those to keep: float [S]."""


def _named_subclasses(base: type[Policy]) -> list[type[Policy]]:
    named = [base] if hasattr(base, "name") else []
    return named + [found for subclass in base.__subclasses__() for found in _named_subclasses(subclass)]


@cache
def _registry() -> dict[str, type[Policy]]:
    for module in _MODULES:
        importlib.import_module(module)
    for entry in entry_points(group=ENTRY_POINTS):
        entry.load()
    return {policy.name: policy for policy in _named_subclasses(Policy)}  # type: ignore[type-abstract]


def policy_names() -> list[str]:
    """All policies."""
    return list(_registry())


def get_policy(config: EvictConfig) -> Policy:
    """The policy that a configuration names.

    Raises:
        ConfigError: there is none.
    """
    try:
        return _registry()[config.policy](config)
    except KeyError:
        raise ConfigError(f"policy {config.policy!r} is unknown; valid are {', '.join(policy_names())}.") from None
