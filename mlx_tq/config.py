"""What a user can choose about the cache: frozen dataclasses that validate themselves, and the named profiles."""

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any

from mlx_tq.codec.formats import CodecOptions, get_format
from mlx_tq.codec.rotation import ROTATIONS
from mlx_tq.errors import ConfigError
from mlx_tq.policies.config import EvictConfig, parse_budget
from mlx_tq.policies.options import check_types, names_settings
from mlx_tq.policies.triattention import TriAttention

# Tokens leave the tail for the body in blocks of this many logical positions.
BLOCK = 32
# Between the key formats of layers.
SCHEDULE = "+"
# Between the key format of recent tokens and that of older ones.
COLD = "~"
# Fields that name formats of layers, and keep their defaults beside `mean_bits`.
CHOOSING = ("key", "value", "boundary", "outlier")
# Tokens that one short span, what stands around it and the marks of a quotation take.
LEAST_QUOTATION = 128
LONGEST_WAIT = 86_400  # seconds


@names_settings
@dataclass(frozen=True)
class KVConfig:
    """How the KV cache of a model is stored.

    Attributes:
        key: format of keys in the body (see `codec.format_names`), or two, RECENT~COLD, of which older tokens have the
            second; or such for each layer, joined by "+".
        value: format of values in the body; or one for each layer, joined by "+".
        sinks: first tokens kept in the model's type (sinks, system prompt).
        window: last tokens kept in the model's type. 32 to 63 more stay beside them, so that a trim of up to 32 tokens
            restores exactly what was there.
        key_scale: write-time scale of tq keys, "raw", "matched", "ls" or "unbiased" (see `CodecOptions`).
        value_scale: the same for tq values.
        boundary: first and last layers whose keys and values are stored as q8 at least.
        outlier: a layer whose median key norm exceeds this many times the median over layers stores its keys as q8 at
            least. 0 turns it off.
        rotation: "wht" or "haar".
        seed: of the rotations.
        fp32_scales: store scales as fp32 instead of fp16.
        recent: packed tokens whose keys have the first of two formats, a multiple of 32.
        normalize: keys are stored less the mean of their block, and weighted by what queries of the first 128 tokens
            read of each pair of dims; so nothing is packed before these were seen.
        evict: which tokens leave the cache, or None to keep all.
        mean_bits: stored bits a value, scales and means included, that all layers may take together; the formats of
            each are then chosen by what it is known to lose, and take the places of `key` and `value`; `boundary` and
            `outlier` choose none.

    Raises:
        ConfigError: a value that cannot be met, with those that can.
    """

    key: str = "q8"
    value: str = "tq4"
    sinks: int = 128
    window: int = 128
    key_scale: str = "unbiased"
    value_scale: str = "unbiased"
    boundary: int = 0
    outlier: float = 3.0
    rotation: str = "wht"
    seed: int = 42
    fp32_scales: bool = False
    recent: int = 512
    normalize: bool = True
    evict: EvictConfig | None = None
    mean_bits: float | None = None

    def __post_init__(self) -> None:
        check_types(self)
        # An alias and its format are one.
        object.__setattr__(self, "key", SCHEDULE.join(map(_key_name, self.key.split(SCHEDULE))))
        object.__setattr__(self, "value", SCHEDULE.join(map(_value_name, self.value.split(SCHEDULE))))
        CodecOptions(scale=self.key_scale)
        CodecOptions(scale=self.value_scale)
        if self.rotation not in ROTATIONS:
            raise ConfigError(f"rotation {self.rotation!r} is unknown; valid are {', '.join(ROTATIONS)}.")
        for name in ("sinks", "window", "boundary", "outlier", "seed"):
            value = getattr(self, name)
            if not value >= 0:  # also refuses NaN
                raise ConfigError(f"{name} is {value}; it must be 0 or more.")
        if self.recent < BLOCK or self.recent % BLOCK:
            raise ConfigError(f"recent is {self.recent}; it must be a multiple of {BLOCK}, such as 512.")
        named = [name for name in CHOOSING if getattr(self, name) != getattr(KVConfig, name)]
        if self.mean_bits is not None and named:
            raise ConfigError(
                f"mean_bits is {self.mean_bits:g} and chooses the formats of all layers; {named[0]} is "
                f"{getattr(self, named[0])!r} and chooses some too. Drop one of the two."
            )
        if self.evict is not None:
            self._check_eviction(self.evict)

    def _check_eviction(self, evict: EvictConfig) -> None:
        if isinstance(evict.recall, int) and evict.recall < BLOCK:
            raise ConfigError(
                f"recall is {evict.recall} tokens, fewer than a block of {BLOCK}, which comes back whole or not "
                f"at all. Write at least {BLOCK}, or auto, or off (--kv-recall off)."
            )
        tokens = parse_budget(evict.budget).tokens
        if tokens is not None and tokens <= self.sinks + self.latest:
            recent = f" plus {self.latest - self.window} with recent keys" if self.latest > self.window else ""
            lower = "lower --kv-recent, or take --kv-recall off" if recent else "lower sinks or window"
            raise ConfigError(
                f"a budget of {tokens} tokens is not above sinks {self.sinks} plus window {self.window}{recent}, "
                f"which are never evicted. Raise the budget, or {lower}."
            )
        if evict.policy.mode in ("v1", "v2") and self.sinks > 0:
            raise ConfigError(
                f"mode {evict.policy.mode} may evict the first tokens; sinks is {self.sinks}. Set sinks to 0."
            )

    @property
    def latest(self) -> int:
        """Last tokens that never leave: where rows come back those with the first of two formats of keys, too."""
        comes_back = self.evict is not None and self.evict.recalls and COLD in self.key
        return self.window + (self.recent + BLOCK if comes_back else 0)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "KVConfig":
        """The inverse of `to_dict`."""
        evict = fields.get("evict")
        return cls(**{**fields, "evict": None if evict is None else EvictConfig.from_dict(evict)})

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; `mean_bits` only until the formats are chosen."""
        fields = vars(self) | {"evict": None if self.evict is None else self.evict.to_dict()}
        return {name: value for name, value in fields.items() if name != "mean_bits" or value is not None}

    def formats_of(self, layer: int, layers: int) -> tuple[str, str]:
        """The formats of keys and values of one of `layers` layers.

        Raises:
            ConfigError: a schedule has another length.
        """
        key, value = (
            _scheduled(side, formats, layer, layers) for side, formats in (("key", self.key), ("value", self.value))
        )
        return key, value

    @property
    def is_off(self) -> bool:
        """Nothing would be compressed or evicted: mlx-lm's own cache serves."""
        return self.key == self.value == "fp16" and self.evict is None and self.mean_bits is None

    def fingerprint(self) -> str:
        """16 hex digits that differ where two configurations store different bytes."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]


def _key_name(name: str) -> str:
    """A key's format, or the two of RECENT~COLD, without aliases."""
    parts = [get_format(part).name for part in name.split(COLD)]
    if len(parts) > 2:
        raise ConfigError(f"key {name!r} names {len(parts)} formats; write one, or RECENT{COLD}COLD, for each layer.")
    return COLD.join(dict.fromkeys(parts))


def _value_name(name: str) -> str:
    """A format of values, without aliases."""
    found = get_format(name)
    if found.keys_only:
        raise ConfigError(f"value is {found.name!r}, which is for keys only: {found.keys_only}. Use tq4 or tq3.")
    return found.name


def _scheduled(side: str, formats: str, layer: int, layers: int) -> str:
    names = formats.split(SCHEDULE)
    if len(names) not in (1, layers):
        raise ConfigError(
            f"{side} names {len(names)} formats, and the model has {layers} layers to store. Give one for each of "
            "them, or a single one."
        )
    return names[layer % len(names)]


@names_settings
@dataclass(frozen=True)
class RescueConfig:
    """How a session brings evicted text back.

    Attributes:
        service: "off", "auto" (the service on this machine, or a private one), or a URL.
        top_k: spans asked for.
        score_floor: least similarity of a span, from -1 to 1, or None for what the service's embedder is known to need.
        max_tokens: of the quotation in a turn, LEAST_QUOTATION or more; 0 is an eighth of the model's positions, 2,048
            at most.
        timeout: seconds that a turn waits for the service at most.

    Raises:
        ConfigError: a value that cannot be met, with those that can.
    """

    service: str = "off"
    top_k: int = 8
    score_floor: float | None = None
    max_tokens: int = 0
    timeout: float = 1.0

    def __post_init__(self) -> None:
        check_types(self)
        for name, least, most in (("top_k", 1, 64), ("score_floor", -1, 1), ("max_tokens", 0, 2**20)):
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigError(f"{name} is {value}; it must be from {least} to {most:,}.")
        if 0 < self.max_tokens < LEAST_QUOTATION:
            raise ConfigError(
                f"max_tokens is {self.max_tokens}, which no span fits; it must be {LEAST_QUOTATION} or more, or 0 for "
                "an eighth of the model's positions."
            )
        if not 0 < self.timeout <= LONGEST_WAIT:
            raise ConfigError(f"timeout is {self.timeout}; it must be above 0 and at most {LONGEST_WAIT:,} seconds.")


PROFILES: dict[str, KVConfig] = {
    "off": KVConfig(key="fp16", value="fp16"),
    "safe": KVConfig(key="q8", value="q8"),
    "balanced": KVConfig(key="q8", value="tq4"),
    "small": KVConfig(key="tq4", value="tq4"),
    # With 3-bit keys, or values coded one by one, the next token would be another in more than one of 50.
    "tiny": KVConfig(key="tq4", value="tcq3"),
    # Tokens leave in the blocks in which the archive gives them back.
    "long": KVConfig(evict=EvictConfig(TriAttention(), "50%", "auto")),
}
DEFAULT_PROFILE = "balanced"
# Pairs by the names that other programs give them; a profile may be called so too.
PAIRS = {"turbo8v4": ("q8", "tq4"), "turbo8v3": ("q8", "tq3"), "k8v4": ("fp8", "tq4")}


def profile(name: str, **changes: object) -> KVConfig:
    """The configuration of a named profile, or of one of PAIRS, with some fields replaced.

    Raises:
        ConfigError: an unknown profile, or a value that cannot be met.
    """
    if name in PAIRS:
        key, value = PAIRS[name]
        return KVConfig(**{"key": key, "value": value, **changes})  # type: ignore[arg-type]
    if name not in PROFILES:
        raise ConfigError(f"profile {name!r} is unknown; valid are {', '.join(PROFILES)}.")
    return replace(PROFILES[name], **changes)  # type: ignore[arg-type]
