"""Which part of a model a rank has."""

from dataclasses import dataclass
from typing import Any

from mlx_tq.distributed.group import ALONE, Ranks

_NAME = "_mlx_tq_shard"  # of the model's attribute


@dataclass(frozen=True)
class Shard:
    """A part of a model: some of its heads, and of its hidden neurons.

    Attributes:
        ranks: that have the parts.
        fingerprint: of the whole model.
    """

    ranks: Ranks
    fingerprint: str


def shard_of(model: Any) -> Shard | None:
    """What is known of a part, or None of a whole model."""
    found: Shard | None = getattr(model, _NAME, None)
    return found


def mark(model: Any, shard: Shard) -> None:
    """`model` is this part from now on."""
    setattr(model, _NAME, shard)


def ranks_of(model: Any) -> Ranks:
    """The ranks that have parts of a model; of a whole one this process alone."""
    shard = shard_of(model)
    return ALONE if shard is None else shard.ranks
