"""Study how much of a model's keys their strongest RoPE pairs hold, and print spectral schedules from it.

python -m benchmarks.studies.spectrum [--model M]
"""

import argparse
from typing import Any

import mlx.core as mx

from benchmarks.studies.flags import load_with_ids, open_results, run_study, study_parser
from mlx_tq.codec.formats.base import dtype_of
from mlx_tq.codec.formats.compared.spectral import COUNTS, SpectralCodec
from mlx_tq.config import SCHEDULE, KVConfig
from mlx_tq.evaluate.results import Record
from mlx_tq.evaluate.teacher_forced import check_length
from mlx_tq.prompt_cache.compressed import plan_caches
from mlx_tq.prompt_cache.recording import record_attention

# Share of a layer's key energy that the pairs of a schedule hold at least; a layer whose 16 pairs hold less has tq4.
SCHEDULES = {"lean": 0.5, "even": 0.65, "rich": 0.8}


def measure_spectrum(model: Any, ids: list[int]) -> list[Record]:
    """Return the mean share of key energy in the strongest pairs of each layer, by number of pairs."""
    check_length(model, len(ids))
    plan = plan_caches(model, KVConfig(key=f"spectral{COUNTS[-1]}", outlier=0))
    records = []
    for planned, layer in zip(plan.layers, record_attention(model, ids, 1), strict=True):
        slot = planned.slot
        codec = planned.spec.layout(slot.key_dim, slot.value_dim, dtype_of(slot.dtype)).key
        assert isinstance(codec, SpectralCodec)
        keys = layer.keys.astype(mx.float32)
        energy = mx.sort(mx.square(keys[..., codec.first]) + mx.square(keys[..., codec.second]), axis=-1)
        total = energy.sum(axis=-1)
        shares = {count: float((energy[..., -count:].sum(axis=-1) / total).mean()) for count in COUNTS}
        records.append({"layer": slot.index, "shares": shares})
    return records


def key_schedules(records: list[Record]) -> dict[str, str]:
    """Return the key formats of each schedule, as `KVConfig.key` takes them: the fewest pairs that hold the share."""

    def formats(share: float) -> list[str]:
        counts = [next((count for count in COUNTS if row["shares"][count] >= share), None) for row in records]
        return ["tq4" if count is None else f"spectral{count}" for count in counts]

    return {name: SCHEDULE.join(formats(share)) for name, share in SCHEDULES.items()}


def run(args: argparse.Namespace) -> None:
    results = open_results(args, "spectrum", ("length",), [])
    model, ids = load_with_ids(args)
    records = measure_spectrum(model, ids)
    for record in records:
        results.add(str(record["layer"]), record)
    columns = {"layer": lambda row: str(row["layer"])}
    columns |= {f"{n} pairs %": lambda row, n=n: f"{100 * row['shares'][n]:.1f}" for n in COUNTS}
    lines = [f"{name} ({SCHEDULES[name]:.0%}): --kv-key {key}" for name, key in key_schedules(records).items()]
    results.show("Energy of keys in their strongest RoPE pairs", columns, records, "\n".join(lines))


if __name__ == "__main__":
    run_study("spectrum", study_parser("Study the key energy of RoPE pairs.", 1024), run)
