"""What the layers of an evicting sequence agree on, and what came of it."""

from dataclasses import dataclass

from mlx_tq.config import Budget, EvictConfig

# What comes back at once where nobody says how much: this part of the budget, and not less than so many tokens.
_RECALL_SHARE, _LEAST_RECALL = 10, 128


@dataclass(frozen=True)
class EvictionPlan:
    """What the caches of a model agree on.

    Attributes:
        config: as asked for.
        budget: in tokens or as a share of those seen; bytes have become tokens.
        layers: evicting caches of a sequence.
        positions: that the model allows, or None where it does not say.
        source: where the queries' statistics come from, for people.
    """

    config: EvictConfig
    budget: Budget
    layers: int
    positions: int | None = None
    source: str = ""

    def allowed(self, seen: int) -> int:
        """Tokens that may stay when `seen` have been seen."""
        return self.budget.tokens if self.budget.tokens is not None else int((self.budget.share or 1.0) * seen)

    def recall_tokens(self, seen: int) -> int:
        """Tokens that may be back from the archive at once when `seen` have been seen."""
        recall = self.config.recall
        if isinstance(recall, int):
            return recall
        return max(self.allowed(seen) // _RECALL_SHARE, _LEAST_RECALL) if recall == "auto" else 0

    def most(self, seen: int, latest: int) -> int:
        """Tokens that are left at most between two passes when `seen` have been seen; the latest ones never leave."""
        return min(seen, max(self.allowed(seen), latest + 1) + self.config.policy.trigger)


@dataclass(frozen=True)
class EvictionStats:
    """What was evicted from a sequence.

    Attributes:
        rounds: of eviction.
        tokens: that left.
        seconds: which scoring, selection and compaction took.
    """

    rounds: int = 0
    tokens: int = 0
    seconds: float = 0.0
