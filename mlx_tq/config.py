"""The configuration of users: frozen dataclasses that validate themselves, and named profiles."""

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from mlx_tq.codec.formats import CodecOptions, get_format
from mlx_tq.codec.rotation import ROTATIONS
from mlx_tq.errors import ConfigError, unknown_name
from mlx_tq.policies import Policy, TriAttention, parse_policy
from mlx_tq.policies.options import check_options, option

BLOCK = 32  # tokens that are packed and archived together
SCHEDULE = "+"  # separates the formats of layers
COLD = "~"  # separates the key format of recent tokens from that of older ones
CHOOSING = ("key", "value", "boundary", "outlier")  # fields that choose formats, which `mean_bits` does too
LEAST_QUOTATION = 128  # tokens of one short span with its surroundings and the marks of a quotation
LONGEST_WAIT = 86_400  # seconds
_BYTES = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


class Budget(NamedTuple):
    """Limits the tokens that may stay in the cache: exactly one of the first three is set."""

    tokens: int | None = None  # of each layer
    share: float | None = None  # of the tokens seen, or of the rows of all heads, at most 1
    nbytes: int | None = None  # of all compressed layers
    length: int | None = None  # tokens at which a share of rows holds; None: the model's context length


def parse_budget(text: int | str) -> Budget:
    """Parse a budget such as 4096 (tokens), "90%" (of the tokens seen) or "2GB" (all compressed layers).

    The share of a policy that evicts by head can name a context length: "40%@4096".
    """
    word, at, length = str(text).strip().upper().partition("@")
    number, unit = word.rstrip("%KMGB"), word[len(word.rstrip("%KMGB")) :]
    try:
        value = float(number)
        if at and unit == "%" and 0 < value <= 100 and int(length) > 0:
            return Budget(share=value / 100, length=int(length))
        if at:
            raise ValueError
        if unit == "" and value == int(value) and value > 0:
            return Budget(tokens=int(value))
        if unit == "%" and 0 < value <= 100:
            return Budget(share=value / 100)
        if unit in _BYTES and int(value * _BYTES[unit]) > 0:
            return Budget(nbytes=int(value * _BYTES[unit]))
    except (ValueError, OverflowError):
        pass
    raise ConfigError(
        f"invalid budget {text!r}; write tokens (4096), a share of the tokens seen from above 0 to 100 (90%), or "
        "bytes (800MB, 2GB). With --kv-evict heads, write a share of the rows at the model's context length (40%) or "
        "at another length (40%@4096)."
    )


@dataclass(frozen=True)
class EvictConfig:
    """Configure which tokens are evicted from the packed region, and whether they can be recalled.

    Attributes:
        policy: what scores the tokens. A text such as "triattention:trigger=64:warmup=512" is parsed by `parse_policy`.
        budget: what may stay in the cache: tokens (4096), a share of those seen ("50%"), or bytes of all compressed
            layers ("2GB").
        recall: maximum number of evicted tokens that one question reloads from the archive when a question needs them.
            "auto" is a tenth of the budget and at least 128, and off where recall is not supported; "off" archives
            nothing.
        recall_every: number of decoded tokens after which the archive is searched again (more for large archives).
        archive_limit: maximum bytes of the archive of one sequence; beyond it the oldest, least recalled blocks are
            deleted. None for a tenth of the free disk, at most 20 GB.

    Raises:
        ConfigError: a wrong type or value; the message names the valid ones.
    """

    policy: Policy = field(default_factory=TriAttention)
    budget: int | str = "50%"
    recall: int | str = "auto"
    recall_every: int = option(64, minimum=1)
    archive_limit: int | None = option(None, minimum=1)

    def __post_init__(self) -> None:
        if isinstance(self.policy, str):
            object.__setattr__(self, "policy", parse_policy(self.policy))
        check_options(self)
        parse_budget(self.budget)
        if self.recall not in ("auto", "off") and (isinstance(self.recall, str) or self.recall < BLOCK):
            raise ConfigError(
                f"recall is {self.recall!r}; write tokens to reload per question (256), at least a block of {BLOCK}; "
                "auto; or off."
            )

    @property
    def recalls(self) -> bool:
        """Return whether evicted rows are archived."""
        return self.recall != "off"

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "EvictConfig":
        """Return the configuration that `to_dict` wrote."""
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, with the policy as text."""
        return vars(self) | {"policy": str(self.policy)}


@dataclass(frozen=True)
class KVConfig:
    """Configure how the KV cache of a model is stored.

    Attributes:
        key: format of packed keys (see `codec.format_names`), or two, RECENT~COLD, the second for older tokens; or such
            for each layer, joined by "+".
        value: format of packed values; or one for each layer, joined by "+".
        sinks: number of first tokens in full precision (attention sinks, system prompt).
        window: number of last tokens in full precision; 32 to 63 more stay so, so that a trim of up to 32 tokens is
            exact.
        key_scale: scale rule of tq keys: "raw", "matched", "ls" or "unbiased" (see `CodecOptions`).
        value_scale: the same for tq values.
        boundary: number of first and last layers that are stored as q8 at least.
        outlier: key norm, in medians over layers, above which a layer's keys are stored as q8 at least; 0 is off.
        rotation: "wht" or "haar".
        seed: seed of the rotations.
        fp32_scales: whether scales are stored as fp32 instead of fp16.
        recent: number of packed tokens whose keys have the first of two formats, a multiple of 32.
        normalize: whether keys are centered by the mean of their block and rescaled by the queries of the first 128
            tokens, before which nothing is packed.
        evict: which tokens are evicted, or None to keep all.
        mean_bits: target average of stored bits per value, scales and means included. It chooses the formats of each
            layer by measured sensitivity, in place of `key`, `value`, `boundary` and `outlier`.

    Raises:
        ConfigError: a wrong type or value; the message names the valid ones.
    """

    key: str = "q8"
    value: str = "tq4"
    sinks: int = option(128, minimum=0)
    window: int = option(128, minimum=0)
    key_scale: str = "unbiased"
    value_scale: str = "unbiased"
    boundary: int = option(0, minimum=0)
    outlier: float = option(3.0, minimum=0)
    rotation: str = option("wht", choices=ROTATIONS)
    seed: int = option(42, minimum=0)
    fp32_scales: bool = False
    recent: int = 512
    normalize: bool = True
    evict: EvictConfig | None = None
    mean_bits: float | None = None

    def __post_init__(self) -> None:
        check_options(self)
        for name, without_aliases in (("key", _key_format), ("value", _value_format)):  # so that equal configs compare
            formats = getattr(self, name).split(SCHEDULE)
            object.__setattr__(self, name, SCHEDULE.join(map(without_aliases, formats)))
        for rule in (self.key_scale, self.value_scale):
            CodecOptions(scale=rule)  # raises for an unknown one
        self._check_normalization()
        if self.recent < BLOCK or self.recent % BLOCK:
            raise ConfigError(f"recent is {self.recent}; it must be a multiple of {BLOCK}, such as 512.")
        changed = [name for name in CHOOSING if getattr(self, name) != getattr(KVConfig, name)]
        if self.mean_bits is not None and changed:
            raise ConfigError(
                f"mean_bits is {self.mean_bits:g} and chooses the formats of all layers; {changed[0]} is "
                f"{getattr(self, changed[0])!r} and chooses some too. Drop one of the two."
            )
        if self.evict is not None:
            self._check_eviction(self.evict)

    def _check_normalization(self) -> None:
        names = [part for key in self.key.split(SCHEDULE) for part in key.split(COLD)]
        sorting = [name for name in names if get_format(name).unsorted]
        if sorting and not self.normalize:
            raise ConfigError(
                f"key is {sorting[0]!r}, which sorts dims by normalized keys, and normalize is off. Turn it on, or "
                f"use {get_format(sorting[0]).unsorted}."
            )

    def _check_eviction(self, evict: EvictConfig) -> None:
        budget = parse_budget(evict.budget)
        tokens = budget.tokens
        if evict.policy.by_head and budget.share is None:
            raise ConfigError(
                f"the policy {evict.policy} keeps a share of the rows, and the budget is {evict.budget}. Write 40% "
                "(at the model's context length) or 40%@4096 (at 4,096 tokens)."
            )
        if budget.length is not None and not evict.policy.by_head:
            raise ConfigError(
                f"the budget {evict.budget} names a context length, which only the policy heads takes; the others keep "
                f"a share of the tokens seen. Write {str(evict.budget).partition('@')[0]}."
            )
        if evict.policy.by_head and COLD in self.key:
            raise ConfigError(
                f"the key {self.key} has two formats, and the policy {evict.policy} keeps different tokens by head. "
                "The two do not go together. Use one key format."
            )
        if tokens is not None and tokens <= self.sinks + self.num_protected:
            recent = (
                f" plus {self.num_protected - self.window} with recent keys" if self.num_protected > self.window else ""
            )
            remedy = "lower --kv-recent, or use --kv-recall off" if recent else "lower sinks or window"
            raise ConfigError(
                f"a budget of {tokens} tokens is not above sinks {self.sinks} plus window {self.window}{recent}, "
                f"which are never evicted. Raise the budget, or {remedy}."
            )
        if evict.policy.can_evict_sinks and self.sinks > 0:
            raise ConfigError(
                f"the policy {evict.policy} may evict the first tokens; sinks is {self.sinks}. Set sinks to 0."
            )

    @property
    def num_protected(self) -> int:
        """The number of last tokens that are never evicted; with recall, those with recent keys are among them."""
        recalls = self.evict is not None and self.evict.recalls
        return self.window + (self.recent + BLOCK if recalls and COLD in self.key else 0)

    @property
    def is_off(self) -> bool:
        """Return whether nothing is compressed or evicted, so that mlx-lm's own cache serves."""
        return self.key == self.value == "fp16" and self.evict is None and self.mean_bits is None

    @classmethod
    def from_profile(cls, name: str, **changes: Any) -> "KVConfig":
        """Return the configuration of a profile such as "small" (see `--kv-profile`), with some fields replaced.

        Raises:
            ConfigError: no such profile, or a wrong type or value of a field; the message names the valid ones.
        """
        if isinstance(name, str) and name in PAIRS:
            key, value = PAIRS[name]
            return cls(**{"key": key, "value": value, **changes})
        if not isinstance(name, str) or name not in PROFILES:
            raise unknown_name("profile", name, PROFILES)
        return replace(PROFILES[name], **changes)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "KVConfig":
        """Return the configuration that `to_dict` wrote."""
        return cls(**{**fields, "evict": fields.get("evict") and EvictConfig.from_dict(fields["evict"])})

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, without a `mean_bits` of None."""
        fields = vars(self) | {"evict": self.evict and self.evict.to_dict()}
        return {name: value for name, value in fields.items() if name != "mean_bits" or value is not None}

    def fingerprint(self) -> str:
        """Return 16 hex digits that differ between configurations that store different bytes."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]

    def formats_of(self, layer: int, layers: int) -> tuple[str, str]:
        """Return the formats of keys and values of one of `layers` layers."""
        names = []
        for side, formats in (("key", self.key.split(SCHEDULE)), ("value", self.value.split(SCHEDULE))):
            if len(formats) not in (1, layers):
                raise ConfigError(
                    f"{side} names {len(formats)} formats, and the model has {layers} layers to store. Give one for "
                    "each of them, or a single one."
                )
            names.append(formats[layer % len(formats)])
        return names[0], names[1]


def _key_format(text: str) -> str:
    """Return a key format, or RECENT~COLD, without aliases."""
    names = [get_format(name).name for name in text.split(COLD)]
    if len(names) > 2:
        raise ConfigError(f"key {text!r} names {len(names)} formats; write one, or RECENT{COLD}COLD, for each layer.")
    return COLD.join(dict.fromkeys(names))


def _value_format(text: str) -> str:
    """Return a value format without aliases."""
    format_ = get_format(text)
    if format_.keys_only:
        raise ConfigError(f"value is {format_.name!r}, which is for keys only: {format_.keys_only}. Use tq4 or tq3.")
    return format_.name


@dataclass(frozen=True)
class RescueConfig:
    """Configure how a session retrieves the text of evicted tokens.

    Attributes:
        service: "off", "auto" (the service on this machine, or a private one), or a URL.
        top_k: maximum number of spans to retrieve.
        score_floor: minimum similarity of a span, from -1 to 1, or None for the default of the service's embedder.
        max_tokens: maximum tokens of the quotation in a turn, at least 128; 0 is an eighth of the model's context, at
            most 2,048.
        timeout: maximum seconds that a turn waits for the service.

    Raises:
        ConfigError: a wrong type or value; the message names the valid ones.
    """

    service: str = "off"
    top_k: int = option(8, minimum=1, maximum=64)
    score_floor: float | None = option(None, minimum=-1, maximum=1)
    max_tokens: int = option(0, minimum=0, maximum=2**20)
    timeout: float = 1.0

    def __post_init__(self) -> None:
        check_options(self)
        if 0 < self.max_tokens < LEAST_QUOTATION:
            raise ConfigError(
                f"max_tokens is {self.max_tokens}, which no span fits; it must be {LEAST_QUOTATION} or more, or 0 for "
                "an eighth of the model's context."
            )
        if not 0 < self.timeout <= LONGEST_WAIT:
            raise ConfigError(f"timeout is {self.timeout}; it must be above 0 and at most {LONGEST_WAIT:,} seconds.")


PROFILES: dict[str, KVConfig] = {
    "off": KVConfig(key="fp16", value="fp16"),
    "safe": KVConfig(key="q8", value="q8"),
    "balanced": KVConfig(key="q8", value="tq4"),
    "small": KVConfig(key="stcq4", value="tq4"),
    # With 3-bit keys, more than one next token of 50 would differ.
    "tiny": KVConfig(key="stcq4", value="tcq3"),
    "long": KVConfig(evict=EvictConfig(TriAttention())),
}
DEFAULT_PROFILE = "balanced"
# Pairs of formats by the names that other programs give them; `KVConfig.from_profile` takes these too.
PAIRS = {"turbo8v4": ("q8", "tq4"), "turbo8v3": ("q8", "tq3"), "k8v4": ("fp8", "tq4")}
