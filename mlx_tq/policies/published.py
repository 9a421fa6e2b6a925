"""The policy `published`: TriAttention with the options of published reports that our measurements did not support."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from mlx_tq.errors import ConfigError
from mlx_tq.policies.calibration import Calibrator, QueryStats
from mlx_tq.policies.options import option
from mlx_tq.policies.policy import PackedLayer, PackedTokens
from mlx_tq.policies.rope import Rope
from mlx_tq.policies.triattention import TriAttention, score_heads, weigh_values


@dataclass(frozen=True, kw_only=True)
class Published(TriAttention):
    """Score as `triattention` does, with options to reproduce published reports; by default both are the same.

    Source: TriAttention (Mao et al., arXiv 2604.04921), sections 3 and 4; TriAttention V1 to V3 (T. Turney).

    Attributes:
        mode: where the lowest scores are evicted: "v1" among all tokens, "v2" in equal segments of the context, "v3" in
            equal segments behind the sinks. "v1" and "v2" require a cache with sinks 0.
        segment_tokens: length of a segment in tokens, instead of the number of segments; 0 is off.
        pooling: score of a block: "mean", "max", or "top", the mean of its highest eighth.
        ema: weight of every later `warmup` tokens in an exponential mean of the prompt's queries; 0 is off.
        recalibrate: number of tokens after which the prompt's queries calibrate again; 0 is off.
        evict: whether the "lowest" or the "highest" scores are evicted; some published ports evict the highest scores.
        aggregation: how scores are combined over heads and layers: "weight", as `triattention`; "paper", with unit
            deviation in each query head, the maximum over the query heads of a KV head, the mean over KV heads and
            layers; "v3", with one mean query for each KV head, the sum over KV heads, the mean over layers.
        score_unrotated_dims: whether to score dimensions without RoPE.
        skip_layers: number of first compressed layers that are not scored.
    """

    name: ClassVar[str] = "published"

    mode: str = option("v3", choices=("v1", "v2", "v3"))
    segment_tokens: int = option(0, minimum=0)
    pooling: str = option("max", choices=("mean", "max", "top"))
    ema: float = 0.0
    recalibrate: int = option(0, minimum=0)
    evict: str = option("lowest", choices=("lowest", "highest"))
    aggregation: str = option("weight", choices=("weight", "paper", "v3"))
    score_unrotated_dims: bool = False
    skip_layers: int = option(0, minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.ema < 1:
            raise ConfigError(f"ema is {self.ema}; it must be from 0 (off) to below 1, such as 0.1.")
        if self.recalibrate and self.recalibrate < self.warmup:
            raise ConfigError(f"recalibrate is {self.recalibrate}; it must be 0 or at least warmup ({self.warmup}).")

    @property
    def min_layers(self) -> int:
        return self.skip_layers + 1

    @property
    def can_evict_sinks(self) -> bool:
        return self.mode != "v3"

    @property
    def recalibrates(self) -> bool:
        return bool(self.ema or self.recalibrate)

    def make_calibrator(self, rope: Rope | None = None, stats: QueryStats | None = None) -> Calibrator:
        return _WindowCalibrator(self.warmup, rope=rope, stats=stats, ema=self.ema, recalibrate=self.recalibrate)

    def score(self, tokens: PackedTokens) -> np.ndarray:
        scores = super().score(replace(tokens, layers=tokens.layers[self.skip_layers :]))
        return -scores if self.evict == "highest" else scores

    def score_layer(self, layer: PackedLayer, rope: Rope, stats: QueryStats, tokens: int, last: int) -> np.ndarray:
        if self.aggregation == "v3":
            heads = layer.rows.shape[1]  # the mean query of each group serves its KV head
            means = [x.reshape(heads, -1, x.shape[1]).mean(axis=1) for x in (stats.center, stats.amplitude)]
            stats = QueryStats(*means)
        scores = score_heads(layer, rope, stats, tokens, last, unrotated=self.score_unrotated_dims)  # [H, G, S]
        if self.aggregation == "weight":
            return weigh_values(scores / layer.layout.key.head_dim**0.5, layer.value_norms(tokens))
        if self.aggregation == "v3":
            return np.array(scores.sum(axis=(0, 1)), np.float64)
        deviation = mx.maximum(mx.std(scores, axis=-1, keepdims=True), 1e-12)
        normed = (scores - scores.mean(axis=-1, keepdims=True)) / deviation
        return np.array(normed.max(axis=1).mean(axis=0), np.float64)

    def segment_numbers(self, positions: np.ndarray, start: int, stop: int) -> np.ndarray:
        if self.mode == "v1":
            return np.zeros(len(positions), np.int64)
        if not self.segment_tokens:
            return super().segment_numbers(positions, start, stop)
        count = -(-max(stop - start, 1) // self.segment_tokens)
        numbers: np.ndarray = np.clip((positions - start) // self.segment_tokens, 0, count - 1)
        return numbers

    def pool_blocks(self, scores: np.ndarray, starts: np.ndarray) -> np.ndarray:
        if self.pooling == "max":
            return super().pool_blocks(scores, starts)
        if self.pooling == "mean":
            pooled: np.ndarray = np.add.reduceat(scores, starts) / np.diff(starts, append=len(scores))
            return pooled
        blocks = np.split(scores, starts[1:])
        return np.array([np.sort(block)[-max(1, len(block) // 8) :].mean() for block in blocks])


class _WindowCalibrator(Calibrator):
    """Blends the statistics of later windows in with weight `ema`, or replaces them every `recalibrate` tokens."""

    def __init__(self, warmup: int, *, ema: float, recalibrate: int, **options: Any) -> None:
        super().__init__(warmup, **options)
        self.ema, self.recalibrate = ema, recalibrate
        self._is_fixed = self.stats is not None  # the statistics are those of a file

    @property
    def _is_open(self) -> bool:
        return not self._is_fixed and (self.stats is None or bool(self.ema or self.recalibrate))

    def _finish_window(self) -> None:
        previous = self.stats
        super()._finish_window()
        if previous is not None and self.stats is not None and self.ema:
            self.stats = previous.blend(self.stats, self.ema)
        if not self.ema and self.recalibrate:
            self._next += self.recalibrate - self.warmup

    @property
    def state(self) -> dict[str, Any]:
        return super().state | {"is_fixed": int(self._is_fixed)}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._is_fixed = bool(state["is_fixed"])
