"""Chooses the key and value formats of each layer, so that the whole model loses least within a number of bits.

The loss of a layer was measured once with its keys and once with its values at one format. At another format it is
assumed to grow with that format's squared error, and losses of layers to add up: the KL divergence is of second order
in the errors, which are independent. The best choice for all layers is then a knapsack problem, solved exactly.
"""

from dataclasses import dataclass, replace
from itertools import product
from math import gcd

import numpy as np

from mlx_tq.cache.spec import CacheSpec
from mlx_tq.codec.formats import get_format
from mlx_tq.codec.normalization import MEAN_TOKENS
from mlx_tq.config import COLD, SCHEDULE, KVConfig
from mlx_tq.errors import ConfigError
from mlx_tq.integration.probe import ModelFacts, SlotFacts
from mlx_tq.prompt_cache.layer_bytes import MEAN_BYTES, layer_layout
from mlx_tq.prompt_cache.measurements import MEASURED_KEY, MEASURED_VALUE, Losses

_KEYS = ("q8", "stcq4", "stcq3", "stcq2")
_VALUES = ("q8", "tq4", "tcq3", "tcq2")
_PROMOTED = "q8"  # the least format where low-bit keys or values would hurt


@dataclass(frozen=True)
class Allocation:
    """The result of choosing formats."""

    limit: float  # allowed bits per value
    bits: float  # per value, of the formats that were chosen
    loss: float  # predicted KL divergence from the uncompressed cache, in nats


def allocate(facts: ModelFacts, config: KVConfig, bits: float, losses: Losses) -> tuple[KVConfig, Allocation]:
    """Return the configuration with formats for each layer that take at most `bits` per value, and their loss."""
    slots = facts.slots
    if len(losses.keys) != len(slots):
        raise ConfigError(
            f"the losses are of {len(losses.keys)} layers, and {facts.model_type} stores {len(slots)}. Measure them "
            "again with mlx_tq.calibrate --losses."
        )
    plain = replace(config, mean_bits=None)
    keys = [key if config.normalize else get_format(key).unsorted or key for key in _KEYS]
    pairs = [[_stored(slot, *pair) for pair in product(keys, _VALUES)] for slot in slots]
    specs = [
        [CacheSpec.for_layer(plain, slot.index, *pair, latent=slot.latent) for pair in of_layer]
        for slot, of_layer in zip(slots, pairs, strict=True)
    ]
    sizes = np.array([[stored_bits(slot, spec) for spec in row] for slot, row in zip(slots, specs, strict=True)])
    measured = [_stored(slot, MEASURED_KEY, MEASURED_VALUE) for slot in slots]
    layer_losses = np.array(
        [
            [
                loss_of_keys * _relative(key, measured_key, config.key_scale)
                + loss_of_values * _relative(value, measured_value, config.value_scale)
                for key, value in of_layer
            ]
            for loss_of_keys, loss_of_values, (measured_key, measured_value), of_layer in zip(
                losses.keys, losses.values, measured, pairs, strict=True
            )
        ]
    )
    values = sum(slot.heads * (slot.key_dim + slot.value_dim) for slot in slots)
    if sizes.min(axis=1).sum() > bits * values:
        raise ConfigError(
            f"mean_bits is {bits:g}; {facts.model_type} takes {sizes.min(axis=1).sum() / values:.2f} at least, with "
            f"{keys[-1]}/{_VALUES[-1]} in every layer. Give that or more."
        )
    chosen = solve_knapsack(sizes, layer_losses, int(bits * values))
    key, value = (
        SCHEDULE.join(of_layer[choice][side] for of_layer, choice in zip(pairs, chosen, strict=True)) for side in (0, 1)
    )
    taken, loss = (float(table[np.arange(len(slots)), chosen].sum()) for table in (sizes, layer_losses))
    return replace(plain, key=key, value=value, outlier=0.0), Allocation(bits, taken / values, loss)


def promote(name: str) -> str:
    """Return a format, or the least one that does not hurt where low bits would."""
    bits = min(get_format(part).bits for part in name.split(COLD))
    return name if bits >= get_format(_PROMOTED).bits else _PROMOTED


def without_sorting(slot: SlotFacts, key: str) -> tuple[str, str]:
    """Return a key format that the layer can store, and why it does not sort dims if the given one does."""
    first, *cold = key.split(COLD)
    fmt = get_format(first)
    if not fmt.unsorted or not (slot.latent or slot.key_dim % fmt.multiple):
        return key, ""
    reason = "latents are values too" if slot.latent else f"{slot.key_dim} dims are no multiple of {fmt.multiple}"
    return COLD.join([fmt.unsorted, *cold]), f"keys not sorted: {reason}"


def _stored(slot: SlotFacts, key: str, value: str) -> tuple[str, str]:
    return without_sorting(slot, key)[0], promote(value) if slot.latent else value


def stored_bits(slot: SlotFacts, spec: CacheSpec) -> int:
    """Return the bits of a packed token of a layer, all heads: codes, scales, and its share of a block's mean."""
    mean = slot.key_dim * MEAN_BYTES / MEAN_TOKENS if spec.normalize else 0
    return round(8 * slot.heads * (layer_layout(slot, spec).nbytes + mean))


def _relative(name: str, measured: str, rule: str) -> float:
    """Return the squared error of a format relative to that of the measured one, both with a scale rule."""
    return get_format(name).error_with(rule) / get_format(measured).error_with(rule)


def solve_knapsack(sizes: np.ndarray, losses: np.ndarray, limit: int) -> list[int]:
    """Return the choice [L] of least total loss [L, C] whose total integer size [L, C] is at most `limit`."""
    unit = gcd(*sizes.flatten().tolist())
    sizes, room = sizes // unit, limit // unit
    least = np.zeros(room + 1)  # loss of the layers so far within so much room
    choices = []
    for size, loss in zip(sizes, losses, strict=True):
        options = np.full((len(size), room + 1), np.inf)
        for number, (taken, lost) in enumerate(zip(size, loss, strict=True)):
            if taken <= room:
                options[number, taken:] = least[: room + 1 - taken] + lost
        choices.append(options.argmin(axis=0))
        least = options.min(axis=0)
    chosen: list[int] = []
    for size, choice in zip(reversed(sizes), reversed(choices), strict=True):
        chosen.append(int(choice[room]))
        room -= int(size[chosen[-1]])
    return chosen[::-1]
