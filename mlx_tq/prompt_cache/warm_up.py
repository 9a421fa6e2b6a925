"""Compiles the kernels of prompts and decode steps when a model is loaded, and not in the first answer."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlx_tq.config import BLOCK
from mlx_tq.integration.batch_probe import merge_rows
from mlx_tq.kernels import backend, execution_record, thresholds
from mlx_tq.kernels.thresholds import RANGES
from mlx_tq.prompt_cache.build import build_caches
from mlx_tq.prompt_cache.compressed import compressed_attention
from mlx_tq.prompt_cache.plan import Plan


def compile_kernels(model: Any, plan: Plan | None, *, lengths: Iterable[int] = (1,), batches: bool = False) -> None:
    """Run a prompt, then passes of `lengths` tokens, on small caches of the plan: attention in one kernel and in two.

    Their regions are small too, for sizes are no part of a kernel. With `batches`, decode steps of two sequences
    follow. Without a GPU nothing runs, but the kernels of a CPU are compiled. The execution record is cleared.
    """
    backend.prepare()
    if plan is None or not backend.is_gpu() or not any(layer.has_kernels for layer in plan.layers):
        execution_record.clear()
        return
    layers = [replace(layer, spec=replace(layer.spec, sinks=0, window=1)) for layer in plan.layers]
    small = replace(plan, layers=layers, eviction=None)
    # The first pass packs tokens; the second is too long to attend to packed rows.
    passes = max(layer.spec.first_packed for layer in layers) + BLOCK, RANGES["packed_queries"][1] + 1
    with compressed_attention(model):
        sequences = [build_caches(small) for _ in range(2 if batches else 1)]
        for caches in sequences:
            for tokens in passes:
                _run(model, 1, tokens, caches)
        for length in lengths:
            _run_both(model, 1, length, sequences[0])
        if batches and all(hasattr(cache, "merge") for cache in sequences[0]):
            _run_both(model, 2, 1, merge_rows(sequences))
    execution_record.clear()


def _run_both(model: Any, batch: int, length: int, caches: list[Any]) -> None:
    for short_tokens in RANGES["short_tokens"]:
        with thresholds.changed(short_tokens=short_tokens):
            _run(model, batch, length, caches)


def _run(model: Any, batch: int, length: int, caches: list[Any]) -> None:
    mx.eval(model(mx.zeros((batch, length), mx.int32), cache=caches))
