"""The base classes of eviction policies, what they score, and how a policy is found by name.

A policy is a frozen dataclass with a `name` and a method `score`; its fields are its options. Other packages add more
through the entry-point group `mlx_tq.policies`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.metadata import entry_points
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from mlx_tq.codec.normalization import KeyNormalization, decode_keys
from mlx_tq.codec.rows import RowLayout
from mlx_tq.errors import ConfigError
from mlx_tq.policies.calibration import Calibrator, QueryStats
from mlx_tq.policies.options import check_options, format_spec, option, parse_spec
from mlx_tq.policies.rope import Rope

ENTRY_POINTS = "mlx_tq.policies"
# Values of the option `calibration` that are not the name of a file.
AUTO, TEXT = "auto", "text"


@dataclass(frozen=True)
class PackedLayer:
    """The packed region of one layer; calibrated policies also need its RoPE and the statistics of its queries."""

    rows: mx.array  # keys and values, uint32 [1, H, capacity, W]; rows behind the packed tokens are unused
    layout: RowLayout
    normalization: KeyNormalization | None = None  # None if keys were not normalized
    rope: Rope | None = None
    queries: QueryStats | None = None

    def slice_rows(self, start: int, stop: int) -> "PackedLayer":
        """Return the layer with only the rows from `start` up to `stop`."""
        normalization = None if self.normalization is None else self.normalization.after(start)
        return replace(self, rows=self.rows[:, :, start:stop], normalization=normalization)

    def split(self, tokens: int, size: int = 4096) -> Iterator["PackedLayer"]:
        """Yield the first `tokens` rows, at most `size` at a time, which limits the memory of decoded vectors."""
        for start in range(0, tokens, size):
            yield self.slice_rows(start, min(start + size, tokens))

    def keys(self) -> mx.array:
        """Decode the keys of all rows: fp32 [1, H, S, D]."""
        return decode_keys(self.layout.key, self.layout.keys(self.rows), self.normalization)

    def value_norms(self, tokens: int) -> mx.array:
        """Return the norms of the values of the first `tokens` rows, fp32 [H, S]."""
        return self.map_rows(lambda part: part.layout.value.estimate_norms(part.layout.values(part.rows))[0], tokens)

    def map_rows(self, compute: Callable[["PackedLayer"], mx.array], tokens: int, size: int = 4096) -> mx.array:
        """Return the results [..., S] of `compute` for the first `tokens` rows, evaluated for `size` rows at a time."""
        parts = []
        for part in self.split(tokens, size):
            parts.append(compute(part))
            mx.eval(parts[-1])
        return mx.concatenate(parts, axis=-1)


@dataclass(frozen=True)
class PackedTokens:
    """The packed tokens of one sequence, which are the same in all compressed layers."""

    layers: Sequence[PackedLayer]
    positions: np.ndarray  # ascending, int64 [S]
    offset: int  # tokens seen, which is the position of the next one
    round_number: int  # eviction rounds before this one


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """Score the packed tokens; those with the lowest scores are evicted.

    A subclass is a frozen dataclass with a class variable `name` and a method `score`. Its fields are further options,
    of type bool, int, float or str, or of one of these and None with the default None. `str(policy)` is the text that
    `parse_policy` reads.

    Attributes:
        segments: number of equal parts of the context behind the sinks that each lose the same share of their tokens.
        granularity: aligned tokens that are evicted together: 1, 8, 16, 32 (a block of the archive) or 64. A block has
            the score of its best token.
        trigger: tokens above the budget at which a round of eviction begins.

    Raises:
        ConfigError: an option has a wrong type or value; the message names the valid ones.
    """

    name: ClassVar[str]
    segmented: ClassVar[bool] = True  # if False, `segments` has no effect
    by_head: ClassVar[bool] = False  # whether retrieval heads keep all tokens, and only streaming heads evict

    segments: int = option(8, minimum=1)
    granularity: int = option(32, choices=(1, 8, 16, 32, 64))
    trigger: int = option(128, minimum=1)

    def __post_init__(self) -> None:
        check_options(self)

    def __str__(self) -> str:
        return format_spec(self.name, self)

    @abstractmethod
    def score(self, tokens: PackedTokens) -> np.ndarray:
        """Return the score of each packed token, float [S]."""

    @property
    def min_layers(self) -> int:
        """The number of compressed layers that a model must have."""
        return 1

    @property
    def can_evict_sinks(self) -> bool:
        """Return whether the first tokens are scored like all others, which requires a cache without sink tokens."""
        return False

    def segment_numbers(self, positions: np.ndarray, start: int, stop: int) -> np.ndarray:
        """Return the number of the segment of [start, stop) in which each position lies, int64 [N]."""
        if not self.segmented:
            return np.zeros(len(positions), np.int64)
        width = max(stop - start, 1) / self.segments
        numbers: np.ndarray = np.clip(((positions - start) / width).astype(np.int64), 0, self.segments - 1)
        return numbers

    def pool_blocks(self, scores: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Return one score for each block of tokens, given the index at which each block starts."""
        pooled: np.ndarray = np.maximum.reduceat(scores, starts)
        return pooled


@dataclass(frozen=True, kw_only=True)
class CalibratedPolicy(Policy):
    """Score with statistics of each layer's queries.

    Source of the calibration: TriAttention (Mao et al., arXiv 2604.04921).

    Attributes:
        warmup: number of tokens of the prompt whose queries calibrate if `calibration` is "text"; nothing is evicted
            before that, unless a question follows.
        calibration: "auto": statistics measured once per model and cached, else as "text"; "text": measured on the
            prompt; or a file from mlx_tq.calibrate.
    """

    needs_covariance: ClassVar[bool] = False

    warmup: int = option(1024, minimum=1)
    calibration: str = AUTO

    @property
    def recalibrates(self) -> bool:
        """Return whether the statistics change during the prefill, after the warm-up."""
        return False

    @property
    def uses_auto_calibration(self) -> bool:
        """Return whether to use the cached calibration of the model."""
        return self.calibration == AUTO and not self.recalibrates

    @property
    def file(self) -> str | None:
        """The name of the calibration file, or None."""
        return None if self.calibration in (AUTO, TEXT) else self.calibration

    def make_calibrator(self, rope: Rope | None = None, stats: QueryStats | None = None) -> Calibrator:
        """Return what gathers the statistics of one layer; with `stats`, those of a file, it gathers none."""
        return Calibrator(self.warmup, covariance=self.needs_covariance, rope=rope, stats=stats)

    def score(self, tokens: PackedTokens) -> np.ndarray:
        """Return the mean over layers of the scores of `score_layer`, float64 [S]."""
        total = np.zeros(len(tokens.positions), np.float64)
        for layer in tokens.layers:
            if layer.queries is None or layer.rope is None:
                raise ConfigError(
                    f"{self.name} needs calibrated queries, and a layer lacks them. Run the model inside "
                    "`with mlx_tq.compressed(model):`."
                )
            total += self.score_layer(layer, layer.rope, layer.queries, len(total), tokens.offset - 1)
        return total / len(tokens.layers)

    @abstractmethod
    def score_layer(self, layer: PackedLayer, rope: Rope, stats: QueryStats, tokens: int, last: int) -> np.ndarray:
        """Return the scores of the first `tokens` rows of one layer, float64 [S]; `last` is the last position seen."""


@cache
def _load_plug_ins() -> None:
    for entry in entry_points(group=ENTRY_POINTS):
        entry.load()


def _named_subclasses(base: type[Policy]) -> list[type[Policy]]:
    named = [base] if "name" in vars(base) else []
    return named + [policy for subclass in base.__subclasses__() for policy in _named_subclasses(subclass)]


def _registry() -> dict[str, type[Policy]]:
    _load_plug_ins()
    return {policy.name: policy for policy in _named_subclasses(Policy)}  # type: ignore[type-abstract]


def policy_names() -> list[str]:
    """Return the names of all policies, including those of other packages."""
    return list(_registry())


def parse_policy(text: str, **defaults: Any) -> Policy:
    """Parse a policy with its options, such as `triattention:trigger=64:warmup=512`.

    Args:
        text: the name and the options. Switches are `on` and `off`; a colon in a file's name is written `%3A`.
        defaults: values of options that the text omits; options of other policies are ignored.

    Raises:
        ConfigError: an unknown policy, option or value; the message names the valid ones.
    """
    policy, values = parse_spec(text, "policy", _registry())
    names = [field.name for field in fields(policy)]
    return policy(**{name: value for name, value in defaults.items() if name in names} | values)  # type: ignore[no-any-return]
