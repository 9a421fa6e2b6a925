"""What a sweep compares: variants of eviction, each at several retentions, granularities, triggers and prefixes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.policies import parse_policy


@dataclass(frozen=True)
class Setting:
    """One way to evict: a policy with its options, and a budget.

    Attributes:
        variant: a policy with options, as `parse_policy` takes it; its options win over what follows.
        retention: of the tokens seen, the share that stays, in percent.
        granularity: tokens that leave together.
        trigger: tokens above the budget at which a round begins.
        sinks: first tokens that stay; 0 if the policy can evict them.
        once: needles are asked for after one round that follows the reading of the text (see `once`).
    """

    variant: str
    retention: float
    granularity: int = 1
    trigger: int = 128
    sinks: int = KVConfig.sinks
    once: bool = False

    @property
    def name(self) -> str:
        """The name of a setting, unique in a sweep."""
        about = f"{self.variant} {self.retention:g}% blocks {self.granularity} trigger {self.trigger}"
        return f"{about} sinks {self.sinks}{' once' if self.once else ''}"

    def config(self, base: KVConfig, warmup: int) -> KVConfig:
        """The whole configuration, with everything else as in `base`.

        Raises:
            ConfigError: a value that cannot be met.
        """
        policy = parse_policy(self.variant, granularity=self.granularity, trigger=self.trigger, warmup=warmup)
        return replace(base, sinks=self.sinks, evict=EvictConfig(policy, f"{self.retention}%", "off"))


def grid(
    variants: Sequence[str],
    retentions: Sequence[float],
    granularities: Sequence[int],
    triggers: Sequence[int],
    prefixes: Sequence[int],
    *,
    once: bool = False,
) -> list[Setting]:
    """All combinations, each once; policies that can evict sinks take sinks 0 whatever `prefixes` says."""
    found = []
    for variant, retention, granularity, trigger, sinks in product(
        variants, retentions, granularities, triggers, prefixes
    ):
        policy = parse_policy(variant, warmup=1)  # the warm-up of the sweep comes later
        own = 0 if policy.can_evict_sinks else sinks
        found.append(Setting(variant, retention, granularity, trigger, own, once))
    return list(dict.fromkeys(found))
