"""What a sweep compares: variants of eviction, each at several retentions, granularities, triggers and prefixes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.errors import ConfigError
from mlx_tq.evict.policy import get_policy, policy_names

_MODES = ("v1", "v2", "v3")
_CONTROLS = "v2,v1,random,recency,streaming,knorm"
DEFAULT_VARIANTS = f"v3,v3:evict=highest,v3:nope=off,v3:evict=highest:nope=off,{_CONTROLS}"
_KINDS = {field.name: type(field.default).__name__ for field in fields(EvictConfig)}
_READ: dict[str, Callable[[str], Any]] = {"bool": {"on": True, "off": False}.__getitem__, "int": int, "float": float}
_EXPECTED = {"bool": "on or off", "int": "a whole number", "float": "a number"}


@dataclass(frozen=True)
class Setting:
    """One way to evict.

    Attributes:
        variant: as `parse_variant` takes it.
        retention: of the tokens seen, the share that stays, in percent.
        granularity: tokens that leave together.
        trigger: tokens above the budget at which a round begins.
        prefix: first tokens that stay; 0 in modes v1 and v2.
        once: needles are asked for after one round that follows the reading of the text (see `once`).
    """

    variant: str
    retention: float
    granularity: int = 1
    trigger: int = 128
    prefix: int = KVConfig.prefix
    once: bool = False

    @property
    def name(self) -> str:
        """Unique in a sweep."""
        about = f"{self.variant} {self.retention:g}% blocks {self.granularity} trigger {self.trigger}"
        return f"{about} prefix {self.prefix}{' once' if self.once else ''}"

    def config(self, base: KVConfig, warmup: int) -> KVConfig:
        """The whole configuration, with everything else as in `base`.

        Raises:
            ConfigError: a value that cannot be met.
        """
        evict = EvictConfig(
            **{
                "budget": f"{self.retention}%",
                "granularity": self.granularity,
                "trigger": self.trigger,
                "warmup": warmup,
                **parse_variant(self.variant),
            }
        )
        get_policy(evict)
        return replace(base, prefix=self.prefix, evict=evict)


def parse_variant(text: str) -> dict[str, Any]:
    """Fields of `EvictConfig` from a mode of TriAttention or a policy's name, and further fields.

    Examples: `v3`, `v3:evict=highest`, `v3:nope=off:aggregation=v3`, `random:seed=1`.

    Raises:
        ConfigError: an unknown policy or field, or a value of another type.
    """
    name, *options = text.split(":")
    if name not in (*_MODES, *policy_names()):
        valid = ", ".join(dict.fromkeys((*_MODES, *policy_names())))
        raise ConfigError(f"policy {name!r} is unknown; valid are {valid}.")
    found: dict[str, Any] = {"policy": "triattention", "mode": name} if name in _MODES else {"policy": name}
    for option in options:
        field, equals, value = option.partition("=")
        if not equals or field not in _KINDS or field in ("policy", "budget"):
            raise ConfigError(
                f"{option!r} in {text!r} is no option of eviction; write one such as evict=highest, nope=off or "
                "aggregation=v3."
            )
        kind = _KINDS[field]
        try:
            found[field] = _READ.get(kind, str)(value)
        except (KeyError, ValueError):
            raise ConfigError(f"{option!r} in {text!r} does not fit: {field} takes {_EXPECTED[kind]}.") from None
    return found


def grid(
    variants: Sequence[str],
    retentions: Sequence[float],
    granularities: Sequence[int],
    triggers: Sequence[int],
    prefixes: Sequence[int],
    *,
    once: bool = False,
) -> list[Setting]:
    """All combinations, each once; modes v1 and v2 take prefix 0 whatever `prefixes` says."""
    found = []
    for variant, retention, granularity, trigger, prefix in product(
        variants, retentions, granularities, triggers, prefixes
    ):
        own = 0 if parse_variant(variant).get("mode") in ("v1", "v2") else prefix
        found.append(Setting(variant, retention, granularity, trigger, own, once))
    return list(dict.fromkeys(found))
