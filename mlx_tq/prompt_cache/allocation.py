"""Bits where they count: for each layer the pair of formats, so that all of them lose least within their bits.

What a layer loses was measured once with its keys, and once with its values, at one format. At another it is taken to
lose as much more as that format's squared error is larger, and the losses of layers to add up: the KL divergence is
of second order in the errors, which are independent of one another. Which choice of each layer is best is then a
knapsack, solved exactly.
"""

from dataclasses import dataclass, replace
from itertools import product
from math import gcd

import numpy as np

from mlx_tq.cache.spec import CacheSpec
from mlx_tq.codec.formats import get_format
from mlx_tq.codec.normalization import MEAN_TOKENS
from mlx_tq.config import SCHEDULE, KVConfig
from mlx_tq.errors import ConfigError
from mlx_tq.integration.probe import ModelFacts, SlotFacts
from mlx_tq.prompt_cache.footprint import MEAN, layer_layout
from mlx_tq.prompt_cache.losses import MEASURED_AT, Losses

CHOICES = ("q8", "tq4", "tq3", "tq2")


@dataclass(frozen=True)
class Allocation:
    """Formats that were chosen.

    Attributes:
        asked: bits a value that were allowed.
        bits: that are taken.
        loss: KL divergence from the fp16 cache, in nats, as predicted.
    """

    asked: float
    bits: float
    loss: float


def allocate(facts: ModelFacts, config: KVConfig, bits: float, losses: Losses) -> tuple[KVConfig, Allocation]:
    """The configuration with a pair of formats for each layer, and what these are worth.

    Args:
        facts: of the model.
        config: of everything else.
        bits: that all layers may take together, of a value.
        losses: of the model's layers.

    Raises:
        ConfigError: fewer bits than the smallest formats take, or losses of another number of layers.
    """
    slots = facts.slots
    if len(losses.keys) != len(slots):
        raise ConfigError(
            f"the losses are of {len(losses.keys)} layers, and {facts.model_type} stores {len(slots)}. Measure them "
            "again with mlx_tq.calibrate --losses."
        )
    pairs = list(product(CHOICES, CHOICES))
    plain = replace(config, mean_bits=None)
    sizes = np.array([[_bits(slot, plain, *pair) for pair in pairs] for slot in slots])
    worth = np.array(
        [
            [key * _relative(pair[0]) + value * _relative(pair[1]) for pair in pairs]
            for key, value in zip(losses.keys, losses.values, strict=True)
        ]
    )
    values = sum(slot.heads * (slot.key_dim + slot.value_dim) for slot in slots)
    if sizes.min(axis=1).sum() > bits * values:
        raise ConfigError(
            f"mean_bits is {bits:g}; {facts.model_type} takes {sizes.min(axis=1).sum() / values:.2f} at least, with "
            f"{CHOICES[-1]} in every layer. Give that or more."
        )
    chosen = _cheapest(sizes, worth, int(bits * values))
    key, value = (SCHEDULE.join(pairs[choice][side] for choice in chosen) for side in (0, 1))
    taken, loss = (float(table[np.arange(len(slots)), chosen].sum()) for table in (sizes, worth))
    return replace(plain, key=key, value=value, outlier=0.0), Allocation(bits, taken / values, loss)


def stored_bits(slot: SlotFacts, spec: CacheSpec) -> int:
    """Bits of a packed token of a layer, all heads: codes, scales, and its share of a block's mean."""
    mean = slot.key_dim * MEAN / MEAN_TOKENS if spec.normalize else 0
    return round(8 * slot.heads * (layer_layout(slot, spec).nbytes + mean))


def _bits(slot: SlotFacts, config: KVConfig, key: str, value: str) -> int:
    return stored_bits(slot, CacheSpec.for_layer(config, slot.index, key, value))


def _relative(name: str) -> float:
    """How many times the error at which losses were measured."""
    return get_format(name).error / get_format(MEASURED_AT).error


def _cheapest(sizes: np.ndarray, worth: np.ndarray, most: int) -> list[int]:
    """The choice [L] of least total `worth` [L, C] whose total `sizes` [L, C], whole numbers, is at most `most`."""
    unit = gcd(*sizes.flatten().tolist())
    sizes, room = sizes // unit, most // unit
    least = np.zeros(room + 1)  # loss of the layers so far within so much room
    choices = []
    for size, loss in zip(sizes, worth, strict=True):
        options = np.full((len(size), room + 1), np.inf)
        for number, (taken, lost) in enumerate(zip(size, loss, strict=True)):
            if taken <= room:
                options[number, taken:] = least[: room + 1 - taken] + lost
        choices.append(options.argmin(axis=0))
        least = options.min(axis=0)
    found = []
    for size, choice in zip(reversed(sizes), reversed(choices), strict=True):
        found.append(int(choice[room]))
        room -= int(size[found[-1]])
    return found[::-1]
