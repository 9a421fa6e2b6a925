"""What a user can choose about eviction: a policy with its options, and a budget."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from mlx_tq.errors import ConfigError
from mlx_tq.policies.options import check_types, names_settings, write_spec
from mlx_tq.policies.policy import Policy, parse_policy

# Defaults of a policy's options that were others once.
_EARLIER = {"granularity": 1, "aggregation": "paper"}

_BYTES = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


class Budget(NamedTuple):
    """What may stay in the cache; one of the three is set.

    tokens: of a layer. share: of the tokens seen, at most 1. nbytes: of all compressed layers.
    """

    tokens: int | None = None
    share: float | None = None
    nbytes: int | None = None


def parse_budget(text: int | str) -> Budget:
    """A budget such as 4096 (tokens), "90%" (of the tokens seen) or "2GB" (all layers).

    Raises:
        ConfigError: none of these, nothing at all, or more than 100 %.
    """
    word = str(text).strip().upper()
    number, unit = word.rstrip("%KMGB"), word[len(word.rstrip("%KMGB")) :]
    try:
        value = float(number)
        if unit == "" and value == int(value) and value > 0:
            return Budget(tokens=int(value))
        if unit == "%" and 0 < value <= 100:
            return Budget(share=value / 100)
        if unit in _BYTES and int(value * _BYTES[unit]) > 0:
            return Budget(nbytes=int(value * _BYTES[unit]))
    except (ValueError, OverflowError):
        pass
    raise ConfigError(
        f"budget {text!r} cannot be met; write tokens (4096), a share of the tokens seen from above 0 to 100 (90%), or "
        "bytes (800MB, 2GB)."
    )


@names_settings
@dataclass(frozen=True, init=False)
class EvictConfig:
    """Which tokens leave the packed body, and when.

    Attributes:
        policy: what scores the tokens, with its options. A text such as "triattention:aggregation=v3:warmup=512" is
            taken too (see `parse_policy`).
        budget: what may stay: tokens (4096), a share of those seen ("90%"), or bytes of all layers ("2GB").
        recall: whether what leaves is archived and comes back when a question asks for it: tokens that may be back at
            once; "auto" for a tenth of the budget and at least 128, and none where it cannot be combined; or "off".
        recall_every: tokens of an answer between two looks for what it needs itself; more where much is archived.
        archive_limit: bytes of a conversation's archive, beyond which its oldest, least recalled blocks leave it; None
            for 20 GB, or a tenth of the free disk where that is less.

    Raises:
        ConfigError: a value that cannot be met, with those that can.
    """

    policy: Policy
    budget: int | str
    recall: int | str
    recall_every: int
    archive_limit: int | None

    def __init__(
        self,
        policy: Policy | str = "triattention",
        budget: int | str = "90%",
        recall: int | str = "auto",
        *,
        recall_every: int = 64,
        archive_limit: int | None = None,
    ) -> None:
        object.__setattr__(self, "policy", parse_policy(policy) if isinstance(policy, str) else policy)
        object.__setattr__(self, "budget", budget)
        object.__setattr__(self, "recall", recall)
        object.__setattr__(self, "recall_every", recall_every)
        object.__setattr__(self, "archive_limit", archive_limit)
        check_types(self)
        parse_budget(budget)
        if recall not in ("auto", "off") and (not isinstance(recall, int) or recall < 1):
            raise ConfigError(f"recall is {recall!r}; write tokens that may be back at once (256), auto, or off.")
        if recall_every < 1:
            raise ConfigError(f"recall_every is {recall_every}; write tokens from 1 on (64).")
        if archive_limit is not None and archive_limit < 1:
            raise ConfigError(
                f"archive_limit is {archive_limit}; write bytes above 0 (10**9), or None for 20 GB or a tenth of the "
                "free disk."
            )

    @property
    def recalls(self) -> bool:
        """What leaves is archived."""
        return self.recall != "off"

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "EvictConfig":
        """The inverse of `to_dict`; what a text leaves out has the default that it was written under."""
        return cls(**fields | {"policy": parse_policy(fields["policy"], **_EARLIER)})

    def to_dict(self) -> dict[str, Any]:
        """Plain data; the policy is its text, which names what once had another default."""
        return vars(self) | {"policy": write_spec(self.policy.name, self.policy, always=_EARLIER)}
