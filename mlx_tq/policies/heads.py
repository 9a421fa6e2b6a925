"""The policy `heads`: retrieval heads keep all tokens, streaming heads the first ones and a window of the last ones.

Sources: DuoAttention (Xiao et al., arXiv 2410.10819), which trains gates to find the heads that retrieve; the scores
here are those of KVzip (Kim et al., arXiv 2505.23416), gathered in one pass that repeats a text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from mlx_tq.errors import ConfigError
from mlx_tq.policies.options import option
from mlx_tq.policies.policy import PackedTokens, Policy

BLOCK = 32  # tokens that are evicted together
LEAST_WINDOW, MOST_WINDOW = 96, 512  # tokens, if the budget decides
_RETRIEVAL_SHARE = 0.5  # of the budget, for retrieval heads, unless the window is at a bound


@dataclass(frozen=True, kw_only=True)
class Heads(Policy):
    """Evict by head: retrieval heads keep all tokens.

    Which heads these are is measured once for each model, by `mlx_tq.calibrate --heads`. A budget is a share of
    the rows at the model's context length (`40%`) or at another one (`40%@4096`).

    Attributes:
        window: number of last tokens that streaming heads see; None derives it from the budget.
        sinks: number of first tokens that streaming heads see.
    """

    name: ClassVar[str] = "heads"
    segmented: ClassVar[bool] = False
    by_head: ClassVar[bool] = True

    window: int | None = option(None, minimum=BLOCK)
    sinks: int = option(32, minimum=0)
    trigger: int = option(1, minimum=1)
    granularity: int = option(BLOCK, choices=(BLOCK, 2 * BLOCK))

    def score(self, tokens: PackedTokens) -> np.ndarray:
        """Return the positions, so that the oldest are evicted first, and infinity for the first tokens."""
        return np.where(tokens.positions < self.sinks, np.inf, tokens.positions.astype(np.float64))


class Division(NamedTuple):
    """How the KV heads of a model are divided."""

    retrieval_heads: list[tuple[int, ...]]  # of each layer, ascending
    window: int  # last tokens of streaming heads
    first: int  # tokens that streaming heads hold besides their window, at most

    @property
    def num_retrieval(self) -> int:
        """The number of retrieval heads of all layers together."""
        return sum(map(len, self.retrieval_heads))

    def share(self, heads: int, tokens: int) -> float:
        """Return the share of the rows of `tokens` tokens that is kept; `heads` are those of all layers together."""
        full = self.num_retrieval / heads
        return full + (1 - full) * min(1.0, (self.first + self.window) / tokens)


def divide_heads(
    scores: Sequence[Sequence[float]], share: float, tokens: int, first: int, least: int, window: int | None
) -> Division:
    """Divide heads so that `share` of all rows is kept at `tokens` tokens.

    Args:
        scores: of the KV heads of each layer; those with the highest are retrieval heads.
        share: of the rows, above 0 to 1.
        tokens: context length at which it holds.
        first: tokens that streaming heads hold besides their window, at most.
        least: the smallest window that the cache allows.
        window: last tokens of streaming heads; None derives it.
    """
    total = sum(map(len, scores))
    if window is None:
        retrieval = _RETRIEVAL_SHARE * share  # share of the heads
        rest = (share - retrieval) / (1 - retrieval) * tokens - first
        window = max(int(np.clip(rest, LEAST_WINDOW, MOST_WINDOW)) // BLOCK * BLOCK, -(-least // BLOCK) * BLOCK)
    if window < least:
        raise ConfigError(
            f"heads:window={window} is below the {least} last tokens that are in full precision in all heads. Raise "
            "it, or lower --kv-window."
        )
    other = min(1.0, (first + window) / tokens)
    full = 1.0 if other == 1 else (share - other) / (1 - other)
    if full < 0:
        raise ConfigError(
            f"a budget of {share:.0%} of {tokens:,} tokens is less than the {first + window:,} that every head holds, "
            f"{first} first ones and {window} last ones, which are {other:.0%}. Raise --kv-budget, or lower "
            "heads:window, --kv-sinks or --kv-window."
        )
    order = np.argsort([-score for layer in scores for score in layer], kind="stable")
    chosen = set(order[: int(full * total + 1e-9)].tolist())
    retrieval_heads, number = [], 0
    for layer in scores:
        retrieval_heads.append(tuple(head for head in range(len(layer)) if number + head in chosen))
        number += len(layer)
    return Division(retrieval_heads, window, first)
