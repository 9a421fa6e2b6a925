"""How far predictions move from those of the fp16 cache: more sensitive than perplexity, and fit for any model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_tq.evaluate.arms import Arm
from mlx_tq.evaluate.passes import Advance, TokenScores, read_side_by_side
from mlx_tq.evaluate.perplexity import standard_error


@dataclass(frozen=True)
class Divergence:
    """Of one arm; KL divergences in nats.

    Attributes:
        name: of the arm.
        tokens: scored.
        kld: mean KL divergence from the fp16 cache's predictions.
        kld_error: its standard error.
        kld_median: median.
        kld_99: what 99 % of the tokens stay below.
        top1: share of the tokens whose most likely next token is the same, in percent.
        top1_error: its standard error.
        packed: share of the attended tokens that was packed.
    """

    name: str
    tokens: int
    kld: float
    kld_error: float
    kld_median: float
    kld_99: float
    top1: float
    top1_error: float
    packed: float


def summarize_divergence(name: str, scores: TokenScores) -> Divergence:
    """Sum up the divergence of one arm over all tokens."""
    median, high = np.quantile(scores.kld, [0.5, 0.99])
    return Divergence(
        name=name,
        tokens=len(scores.kld),
        kld=float(scores.kld.mean()),
        kld_error=standard_error(scores.kld),
        kld_median=float(median),
        kld_99=float(high),
        top1=100 * float(scores.agrees.mean()),
        top1_error=100 * standard_error(scores.agrees.astype(np.float64)),
        packed=scores.packed,
    )


def measure_divergence(
    model: Any, chunks: list[list[int]], arms: Sequence[Arm], step: int = 512, advance: Advance = lambda tokens: None
) -> list[Divergence]:
    """Divergence of each arm over the same chunks of tokens. The arm `off` is a control: a second fp16 cache.

    Raises:
        ConfigError: no token would be read from a packed body.
    """
    _, *scores = read_side_by_side(model, chunks, arms, step, advance)
    return [summarize_divergence(arm.name, found) for arm, found in zip(arms, scores, strict=True)]
