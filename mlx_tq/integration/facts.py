"""What is known of a model's caches before they are replaced."""

from dataclasses import dataclass
from typing import Any

from mlx_tq.distributed.group import ALONE, Ranks


@dataclass(frozen=True)
class SlotFacts:
    """One plain KV cache of a model.

    Attributes:
        index: of the cache in the model's list.
        part: of the cache inside a CacheList, or None.
        heads: KV heads.
        key_dim, value_dim: sizes of a head's vectors.
        dtype: of keys and values, by name.
        key_norm: median norm of a key.
        shared: later layers read this cache too.
        rope: the RoPE module that made the queries, or None.
        no_rope: why there is none: what the model does instead.
        turns: a RoPE module that turned vectors of this size in or before the layer, also where it is not `rope`.
    """

    index: int
    part: int | None
    heads: int
    key_dim: int
    value_dim: int
    dtype: str
    key_norm: float
    shared: bool
    rope: Any = None
    no_rope: str = ""
    turns: Any = None


@dataclass(frozen=True)
class ModelFacts:
    """What a model keeps between tokens.

    Attributes:
        model_type: mlx-lm's name of the architecture.
        classes: class name of each cache in the model's list.
        slots: the plain KV caches among them.
        counts_keys: the model reads how many keys it fetched.
        positions: that the model allows, or None where its configuration does not say.
        ranks: that have parts of the model, each with its own heads.
    """

    model_type: str
    classes: list[str]
    slots: list[SlotFacts]
    counts_keys: bool = False
    positions: int | None = None
    ranks: Ranks = ALONE
