"""What an eviction policy is: a dataclass, found by name, that owns its options and scores the packed tokens.

Each policy of this package is a file of this folder. Other packages add theirs, a subclass of `Policy` with a `name`,
through the entry-point group `mlx_tq.policies`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.metadata import entry_points
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from mlx_tq.codec.normalization import KeyNormalization, decode
from mlx_tq.codec.rows import RowLayout
from mlx_tq.errors import ConfigError
from mlx_tq.policies.options import check_options, option, read_options, split_spec, unknown, write_spec
from mlx_tq.policies.queries import QueryStats
from mlx_tq.policies.rope import Rope

ENTRY_POINTS = "mlx_tq.policies"
# Whose queries calibrate, where no file is named.
AUTO, TEXT = "auto", "text"


@dataclass(frozen=True)
class PackedLayer:
    """The body of one layer.

    Attributes:
        rows: uint32 [1, H, capacity, W]; those past the body's tokens are unused.
        layout: of the rows.
        normalization: of their keys, or None where these are plain.
        rope: of the layer, where the policy needs queries.
        queries: their statistics, where the policy needs them.
    """

    rows: mx.array
    layout: RowLayout
    normalization: KeyNormalization | None = None
    rope: Rope | None = None
    queries: QueryStats | None = None

    def part(self, start: int, stop: int) -> "PackedLayer":
        """The rows from `start` to `stop`."""
        after = None if self.normalization is None else self.normalization.after(start)
        return replace(self, rows=self.rows[:, :, start:stop], normalization=after)

    def keys(self) -> mx.array:
        """The decoded keys of all rows, fp32 [1, H, S, D]."""
        return decode(self.layout.key, self.layout.keys(self.rows), self.normalization)

    def value_norms(self) -> mx.array:
        """The norms of the values of all rows, as `Codec.norms` has them: fp32 [H, S]."""
        return self.layout.value.norms(self.layout.values(self.rows))[0]


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


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """Scores tokens, and says how the lowest are chosen; `str(policy)` is its text, which `parse_policy` reads.

    A policy adds options as fields of its own: of type bool, int, float or str, or of one of these and None with the
    default None.

    Attributes:
        name: under which the policy is found.
        segmented: whether `mode` has a say; else the lowest of all leave.
        mode: how the lowest are chosen. "v1" among all, "v2" in equal segments of the context, "v3" in equal segments
            behind the sinks. "v1" and "v2" need a cache with sinks 0.
        segments: of modes "v2" and "v3".
        segment_tokens: a constant width of segments instead of their number; 0 is off.
        granularity: aligned tokens that leave together: 1, 8, 16, 32 (as they are archived and recalled) or 64.
        pooling: of a block's scores: "mean", "max", or "top", the mean of its highest eighth.
        trigger: tokens above the budget at which a round begins.

    Raises:
        ConfigError: a value that cannot be met, with those that can.
    """

    name: ClassVar[str]
    segmented: ClassVar[bool] = True

    mode: str = option("v3", choices=("v1", "v2", "v3"))
    segments: int = option(8, least=1)
    segment_tokens: int = option(0, least=0)
    granularity: int = option(32, choices=(1, 8, 16, 32, 64))
    pooling: str = option("max", choices=("mean", "max", "top"))
    trigger: int = option(128, least=1)

    def __post_init__(self) -> None:
        check_options(self)

    def __str__(self) -> str:
        return write_spec(self.name, self)

    @abstractmethod
    def score(self, body: Body) -> np.ndarray:
        """The score of each token, high for those to keep: float [S]."""

    @property
    def least_layers(self) -> int:
        """Compressed layers that a model must have, so that the policy can score its tokens."""
        return 1


@dataclass(frozen=True, kw_only=True)
class CalibratedPolicy(Policy):
    """A policy that scores with the statistics of each layer's queries.

    Source of the calibration: TriAttention (Mao et al., arXiv 2604.04921).

    Attributes:
        needs_covariance: whether the statistics must have the covariance of the queries.
        warmup: tokens whose queries calibrate where the text does; nothing is evicted before, unless a question comes.
        ema: weight of each later `warmup` tokens in an exponential mean of the text's queries, 0 for the first alone.
        recalibrate: tokens after which the calibration on the text starts anew, 0 for never.
        calibration: whose queries calibrate. "auto": those of questions and a text, known of the model beforehand;
            where they are not, or with `ema` or `recalibrate`, the text that is read. "text": that text. Else a file of
            `mlx_tq.calibrate`.
    """

    needs_covariance: ClassVar[bool] = False

    warmup: int = option(1024, least=1)
    ema: float = 0.0
    recalibrate: int = option(0, least=0)
    calibration: str = AUTO

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.ema < 1:
            raise ConfigError(f"ema is {self.ema}; it must be from 0 (plain mean) to below 1, such as 0.1.")
        if self.recalibrate and self.recalibrate < self.warmup:
            raise ConfigError(f"recalibrate is {self.recalibrate}; it must be 0 or at least warmup ({self.warmup}).")

    @property
    def looks_up(self) -> bool:
        """Statistics that are known of the model are to be used."""
        return self.calibration == AUTO and not (self.ema or self.recalibrate)

    @property
    def file(self) -> str | None:
        """The file of statistics that was named, or None."""
        return None if self.calibration in (AUTO, TEXT) else self.calibration

    def calibration_of(self, layer: PackedLayer) -> tuple[Rope, QueryStats]:
        """The RoPE of a layer and the statistics of its queries.

        Raises:
            ConfigError: the layer was not calibrated.
        """
        if layer.queries is None or layer.rope is None:
            raise ConfigError(
                f"{self.name} has no calibrated queries of a layer. Run the model inside "
                "`with mlx_tq.compressed(model):`."
            )
        return layer.rope, layer.queries


@cache
def _load_plug_ins() -> None:
    for entry in entry_points(group=ENTRY_POINTS):
        entry.load()


def _named_subclasses(base: type[Policy]) -> list[type[Policy]]:
    named = [base] if "name" in vars(base) else []
    return named + [found for subclass in base.__subclasses__() for found in _named_subclasses(subclass)]


def _registry() -> dict[str, type[Policy]]:
    _load_plug_ins()
    return {policy.name: policy for policy in _named_subclasses(Policy)}  # type: ignore[type-abstract]


def policy_names() -> list[str]:
    """The names of all policies, those of other packages too."""
    return list(_registry())


def parse_policy(text: str, **defaults: Any) -> Policy:
    """The policy that a text describes: its name and options, such as `triattention:aggregation=v3:warmup=512`.

    Args:
        text: switches are `on` and `off`; in a file's name a colon is `%3A`.
        defaults: of options that the text leaves out; those that the policy does not have are passed over.

    Raises:
        ConfigError: an unknown policy, option or value, with the valid ones.
    """
    name, texts = split_spec(text)
    policies = _registry()
    if name not in policies:
        raise unknown("policy", name, policies)
    policy = policies[name]
    own = {each.name for each in fields(policy)}
    known = {key: value for key, value in defaults.items() if key in own}
    return policy(**{**known, **read_options(policy, name, texts)})
