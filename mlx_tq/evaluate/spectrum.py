"""How much of a model's keys their strongest RoPE pairs hold, and the spectral schedules that follow from it."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_tq.codec.formats.base import dtype_of
from mlx_tq.codec.formats.compared.spectral import COUNTS, SpectralCodec
from mlx_tq.config import SCHEDULE, KVConfig
from mlx_tq.evaluate.passes import check_positions_of
from mlx_tq.evaluate.recording import record
from mlx_tq.prompt_cache.compressed import plan_caches

# Share of a layer's key energy that a profile asks of its pairs.
PROFILES = {"lean": 0.5, "even": 0.65, "rich": 0.8}
# What a layer has whose 16 strongest pairs hold less.
_OTHERWISE = "tq4"


@dataclass(frozen=True)
class SpectrumRow:
    """What the strongest pairs of one layer hold.

    Attributes:
        layer: its number.
        shares: of the energy of a key, what its M strongest pairs hold on average, by M.
    """

    layer: int
    shares: dict[int, float]

    def least(self, share: float) -> str:
        """The spectral format with the fewest pairs that hold `share`, or tq4 where none does."""
        return next((f"spectral{count}" for count in COUNTS if self.shares[count] >= share), _OTHERWISE)


def measure_spectrum(model: Any, ids: list[int]) -> list[SpectrumRow]:
    """Read `ids` and look at the keys of each layer.

    Raises:
        ConfigError: more tokens than the model has positions.
        UnsupportedModelError: a model without RoPE, or without plain KV caches.
    """
    check_positions_of(model, len(ids))
    plan = plan_caches(model, KVConfig(key=f"spectral{COUNTS[-1]}", outlier=0))
    rows = []
    for planned, layer in zip(plan.layers, record(model, ids, 1), strict=True):
        slot = planned.slot
        codec = planned.spec.layout(slot.key_dim, slot.value_dim, dtype_of(slot.dtype)).key
        assert isinstance(codec, SpectralCodec)  # noqa: S101  what the plan was asked for
        keys = layer.keys.astype(mx.float32)
        energy = mx.sort(mx.square(keys[..., codec.first]) + mx.square(keys[..., codec.second]), axis=-1)
        total = energy.sum(axis=-1)
        shares = {count: float((energy[..., -count:].sum(axis=-1) / total).mean()) for count in COUNTS}
        rows.append(SpectrumRow(slot.index, shares))
    return rows


def schedules(rows: list[SpectrumRow]) -> dict[str, str]:
    """The key formats of each profile, as `KVConfig.key` takes them."""
    return {name: SCHEDULE.join(row.least(share) for row in rows) for name, share in PROFILES.items()}
