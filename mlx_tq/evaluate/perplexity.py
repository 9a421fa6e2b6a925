"""Perplexity of a text read through a compressed cache, beside that of the fp16 cache."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_tq.evaluate.arms import OFF, Arm
from mlx_tq.evaluate.passes import Advance, TokenScores, read_side_by_side


@dataclass(frozen=True)
class Perplexity:
    """The perplexity of one arm.

    Attributes:
        name: of the arm.
        tokens: scored.
        ppl: exp of the mean negative log-likelihood.
        ppl_error: its standard error.
        delta: change against the fp16 cache in percent.
        delta_error: its standard error, from the differences token by token, which is far smaller than `ppl_error`.
        packed: share of the attended tokens that was packed.
        nbytes: of the caches after the last chunk, unused capacity included.
        kept: of the tokens seen, the share still in the caches then.
        rounds: of eviction, in all chunks.
        seconds: of reading the last chunk, step by step beside the other arms.
    """

    name: str
    tokens: int
    ppl: float
    ppl_error: float
    delta: float
    delta_error: float
    packed: float
    nbytes: int
    kept: float
    rounds: int
    seconds: float


def standard_error(values: np.ndarray) -> float:
    """Of the mean; tokens count as independent."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.inf


def summarize_perplexity(name: str, scores: TokenScores, baseline: np.ndarray) -> Perplexity:
    """The numbers of one arm; `baseline` is the nll [N] of the fp16 cache."""
    ppl = math.exp(scores.nll.mean())
    difference = scores.nll - baseline
    ratio = math.exp(difference.mean())
    return Perplexity(
        name=name,
        tokens=len(scores.nll),
        ppl=ppl,
        ppl_error=ppl * standard_error(scores.nll),
        delta=100 * (ratio - 1),
        delta_error=100 * ratio * standard_error(difference),
        packed=scores.packed,
        nbytes=scores.nbytes,
        kept=scores.kept,
        rounds=scores.rounds,
        seconds=scores.seconds,
    )


def measure_perplexity(
    model: Any, chunks: list[list[int]], arms: Sequence[Arm], step: int = 512, advance: Advance = lambda tokens: None
) -> list[Perplexity]:
    """Perplexity of each arm over the same chunks of tokens, the fp16 cache first.

    Raises:
        ConfigError: no token would be read from a packed body.
    """
    compressed = [arm for arm in arms if not arm.config.is_off]
    scores = read_side_by_side(model, chunks, compressed, step, advance)
    names = [OFF.name, *(arm.name for arm in compressed)]
    return [summarize_perplexity(name, found, scores[0].nll) for name, found in zip(names, scores, strict=True)]
