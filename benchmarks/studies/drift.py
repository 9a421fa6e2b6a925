"""Study what the prefill step size changes.

    python -m benchmarks.studies.drift --steps 7,32,128,512,2048

A token's place in the cache depends on the length alone, and so do the codes of the first layer. The tokens of a later
layer come from attention, which sees the tokens of its own step in the model's type and all older ones packed: with
smaller steps it reads packed tokens sooner.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from benchmarks.studies.flags import load_with_ids, open_results, run_study, study_parser
from mlx_tq.cli.options import Request
from mlx_tq.errors import ConfigError
from mlx_tq.evaluate.arms import OFF, Arm, arms_from_request
from mlx_tq.evaluate.flag_values import whole_numbers
from mlx_tq.evaluate.results import Columns, Record
from mlx_tq.evaluate.teacher_forced import check_length
from mlx_tq.prompt_cache.compressed import compressed_attention
from mlx_tq.prompt_cache.layer_group import compressed_caches
from mlx_tq.prompt_cache.measurements import kl_divergence, log_probabilities

COLUMNS: Columns = {
    "cache": lambda row: f"{row['name']}, {row['step']} at a time",
    "first layer": lambda row: "-" if row["first_layer"] is None else str(row["first_layer"]),
    "later layers %": lambda row: "-" if row["later_layers"] is None else f"{row['later_layers']:.1f}",
    "KLD": lambda row: f"{row['kld']:.6f}",
    "logits": lambda row: f"{row['logits']:.5f}",
    "top-1 %": lambda row: f"{row['top1']:.2f}",
}


def measure_drift(model: Any, ids: list[int], arm: Arm, sizes: Sequence[int]) -> list[Record]:
    """Prefill `ids` in steps of each size and compare with a single step. The arm `off` is the control.

    `first_layer` is the number of packed vectors with other codes, `later_layers` a percentage; `logits` is the root
    mean square change of the log-probabilities, relative to theirs.
    """
    if arm.config.evict is not None:
        raise ConfigError(f"{arm.name} evicts; drift compares the packed rows of the same tokens. Drop --kv-evict.")
    check_length(model, len(ids))
    make = arm.caches(model)
    exact, exact_rows = _prefill(model, ids, make(), len(ids))
    records = []
    for size in sizes:
        logits, rows = _prefill(model, ids, make(), size)
        changed = [int(mx.any(a != b, axis=-1).sum()) for a, b in zip(exact_rows, rows, strict=True)]
        tokens = sum(a.shape[0] * a.shape[1] * a.shape[2] for a in exact_rows[1:])
        records.append(
            {
                "name": arm.name,
                "step": size,
                "first_layer": changed[0] if changed else None,
                "later_layers": 100 * sum(changed[1:]) / tokens if tokens else None,
                "kld": float(kl_divergence(exact, logits).mean()),
                "logits": float(mx.sqrt(mx.square(exact - logits).mean() / mx.square(exact).mean())),
                "top1": 100 * float((exact.argmax(axis=-1) == logits.argmax(axis=-1)).mean()),
            }
        )
    return records


def _prefill(model: Any, ids: list[int], caches: list[Any], step: int) -> tuple[mx.array, list[mx.array]]:
    """Return log-probabilities [L, V] after each token, and the packed rows [B, H, S, W] of each compressed cache."""
    parts = []
    with compressed_attention(model):
        for start in range(0, len(ids), step):
            parts.append(log_probabilities(model, ids[start : start + step], caches))
            mx.eval(parts[-1])
    packed = [cache.state["rows"] for cache in compressed_caches(caches)]
    return mx.concatenate(parts), [rows for rows in packed if rows is not None]


def run(args: argparse.Namespace) -> None:
    arms, sizes = arms_from_request(Request.from_args(args)), whole_numbers(args.steps, "--steps")
    results = open_results(args, "drift", ("length", "steps"), arms)
    model, ids = load_with_ids(args, *(arm.config for arm in arms))
    for arm in (OFF, *arms):
        for record in measure_drift(model, ids, arm, sizes):
            results.add(f"{record['name']} {record['step']}", record)
    results.show("Against a single prefill step: packed tokens with other codes", COLUMNS, list(results.rows.values()))


if __name__ == "__main__":
    parser = study_parser("Study what the prefill step size changes.", 2048, "balanced")
    parser.add_argument("--steps", default="7,32,128,512,2048", metavar="N,...", help="tokens per prefill step")
    run_study("drift", parser, run)
