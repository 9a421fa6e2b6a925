"""What a user can choose about the cache: frozen dataclasses that validate themselves, and the named profiles."""

import hashlib
import json
from dataclasses import asdict, dataclass, replace

from mlx_tq.codec.formats import CodecOptions, get_format
from mlx_tq.codec.rotation import ROTATIONS
from mlx_tq.errors import ConfigError

# Tokens leave the tail for the body in blocks of this many logical positions.
BLOCK = 32


@dataclass(frozen=True)
class KVConfig:
    """How the KV cache of a model is stored.

    Attributes:
        key: format of keys in the body (see `codec.format_names`).
        value: format of values in the body.
        prefix: first tokens kept in the model's type (sinks, system prompt).
        window: last tokens kept in the model's type. 32 to 63 more stay beside them, so that a trim of up to 32 tokens
            restores exactly what was there.
        key_scale: write-time scale of tq keys, "raw", "matched", "ls" or "unbiased" (see `CodecOptions`).
        value_scale: the same for tq values.
        boundary: first and last layers whose keys and values are stored as q8 at least.
        outlier: a layer whose median key norm exceeds this many times the median over layers stores its keys as q8 at
            least. 0 turns it off.
        rotation: "wht" or "haar".
        seed: of the rotations.
        wide_scale: store scales as fp32 instead of fp16.

    Raises:
        ConfigError: a value that cannot be met, with those that can.
    """

    key: str = "q8"
    value: str = "tq4"
    prefix: int = 128
    window: int = 128
    key_scale: str = "unbiased"
    value_scale: str = "unbiased"
    boundary: int = 0
    outlier: float = 3.0
    rotation: str = "wht"
    seed: int = 42
    wide_scale: bool = False

    def __post_init__(self) -> None:
        for side in ("key", "value"):
            object.__setattr__(self, side, get_format(getattr(self, side)).name)  # an alias and its format are one
        CodecOptions(scale=self.key_scale)
        CodecOptions(scale=self.value_scale)
        if self.rotation not in ROTATIONS:
            raise ConfigError(f"rotation {self.rotation!r} is unknown; valid are {', '.join(ROTATIONS)}.")
        for name in ("prefix", "window", "boundary", "outlier", "seed"):
            value = getattr(self, name)
            if not value >= 0:  # also refuses NaN
                raise ConfigError(f"{name} is {value}; it must be 0 or more.")

    @property
    def is_off(self) -> bool:
        """Nothing would be compressed: mlx-lm's own cache serves."""
        return self.key == self.value == "fp16"

    def fingerprint(self) -> str:
        """16 hex digits that differ where two configurations store different bytes."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


PROFILES: dict[str, KVConfig] = {
    "off": KVConfig(key="fp16", value="fp16"),
    "safe": KVConfig(key="q8", value="q8"),
    "balanced": KVConfig(key="q8", value="tq4"),
    "small": KVConfig(key="tq4", value="tq4"),
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
