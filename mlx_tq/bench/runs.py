"""Run the benchmarks that the flags name, and write tables, JSON and the report."""

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlx_lm.models.cache import KVCache

from mlx_tq.bench.layer import UNSTEADY, CellTimings, measure_cell
from mlx_tq.bench.layer_caches import Cell, LayerArm, LayerShape
from mlx_tq.bench.machine import hide_home, machine_state, swap_growth
from mlx_tq.bench.model import BenchedCache, Figure, measure_model
from mlx_tq.bench.report import figure_tables, figures_as_dict, layer_table, markdown_report, markdown_tables
from mlx_tq.bench.timing import measure_speed
from mlx_tq.bench.tuning import tune
from mlx_tq.cli.diagnostics import environment, run_checks
from mlx_tq.cli.inputs import load_text
from mlx_tq.cli.loading import calibrate_model
from mlx_tq.cli.options import OFF, STDOUT, make_eviction, read_options
from mlx_tq.cli.screen import progress_bar, stderr, stdout, table
from mlx_tq.config import PROFILES
from mlx_tq.errors import ConfigError
from mlx_tq.files import atomic_write
from mlx_tq.integration.probe import model_facts, native_caches
from mlx_tq.kernels import backend, thresholds
from mlx_tq.kernels.gpu import usable_memory
from mlx_tq.kernels.thresholds import HeadShape, KernelThresholds
from mlx_tq.models import load, short_name

LAYER_TOKENS = [2048, 8192, 32768]
MODEL_TOKENS = [1024, 4096, 16384]
REPORT_SHAPES = (LayerShape(32, 8, 128), LayerShape(24, 4, 256))
MEMORY_SHARE = 0.6  # of what arrays may take, for the caches of one layer
CHAIN_SECONDS = 0.05


def run_benchmarks(args: argparse.Namespace) -> int:
    if args.report is not None:
        return _report(args)
    if args.tune:
        _write({"environment": environment(), "thresholds": thresholds.to_rows(_tune(args))}, args.json)
    elif args.model is None:
        _measure_layers(args)
    else:
        _measure_figures(args)
    return 0


def _report(args: argparse.Namespace) -> int:
    before = machine_state()
    checks = run_checks(kernels=backend.is_gpu())
    tuned: list[dict[HeadShape, KernelThresholds]] = []
    figures, skipped = _measure_figures(args, lambda: tuned.append(_tune(args)))
    layers: dict[str, Any] = {"floors": measure_speed()._asdict(), "cells": []}
    dtype = (args.dtypes or ["float16"])[0]
    for shape in REPORT_SHAPES if backend.is_gpu() else [_layer_shape(args)]:
        for tokens in args.tokens or LAYER_TOKENS:
            measured = _measure_layer(args, shape, tokens, dtype)
            layers["cells"].append({"shape": shape, "tokens": tokens, **measured.to_dict()})
    after = machine_state()
    machine = after | {"swap_growth_nbytes": swap_growth(before, after)}
    report = markdown_report(short_name(args.model), checks, tuned[0], figures, skipped, machine, layers)
    _write(hide_home(report), args.report)
    return 0 if all(check.passed for check in checks) else 1


def _measure_layers(args: argparse.Namespace) -> None:
    shape, timings = _layer_shape(args), []
    for dtype in args.dtypes or ("float16", "bfloat16", "float32"):
        for tokens in args.tokens or LAYER_TOKENS:
            measured = _measure_layer(args, shape, tokens, dtype)
            timings += (timed := [timing._asdict() for timing in measured.timings])
            columns, rows = layer_table(timed)
            shown = table(
                f"decode attention, {dtype}, {tokens:,} tokens{'' if measured.steady else UNSTEADY}", *columns
            )
            for row in rows:
                shown.add_row(*row)
            _screen(args).print(shown)
            for name, reason in measured.skipped_arms.items():
                stderr.print(f"skipped: {name}: {reason}", soft_wrap=True, markup=False)
    floors = measure_speed()._asdict()
    _write({"shape": shape._asdict(), "environment": environment(), "floors": floors, "timings": timings}, args.json)


def _layer_shape(args: argparse.Namespace) -> LayerShape:
    return LayerShape(args.query_heads, args.kv_heads, args.head_dim)


def _measure_layer(args: argparse.Namespace, shape: LayerShape, tokens: int, dtype: str) -> CellTimings:
    arms = [LayerArm("off", dtype), *(LayerArm(f"kv-bits {bits}", dtype, kv_bits=bits) for bits in args.kv_bits)]
    arms += [LayerArm(name, dtype, PROFILES[name]) for name in args.profiles if not PROFILES[name].is_off]
    memory = int(MEMORY_SHARE * usable_memory())
    return measure_cell(Cell(shape, tokens), arms, rounds=args.rounds, seconds=CHAIN_SECONDS, memory=memory)


def _tune(args: argparse.Namespace) -> dict[HeadShape, KernelThresholds]:
    columns = ("threshold", "head size", "group", "value", "times as fast as the built-in value, or as the other way")
    shown, best = table(f"thresholds, {thresholds.machine()}", *columns), {}
    for step in tune(args.tokens or LAYER_TOKENS, args.rounds):
        shown.add_row(step.name, *map(str, step.shape), str(step.value), f"{step.speed:.3g}")
        best[step.shape] = step.best
    path = thresholds.write(best)
    _screen(args).print(shown)
    for (dim, group), values in best.items():
        stderr.print(f"heads of {dim}, groups of {group}: {values}", soft_wrap=True)
    stderr.print(f"saved for this machine: {path}", soft_wrap=True)
    return best


def _caches_to_compare(args: argparse.Namespace) -> list[BenchedCache]:
    """Return mlx-lm's caches, each profile, and the last profile with eviction."""
    caches = [BenchedCache("off"), *(BenchedCache(f"kv-bits {bits}", kv_bits=bits) for bits in args.kv_bits)]
    caches += [BenchedCache(name, PROFILES[name]) for name in args.profiles if not PROFILES[name].is_off]
    values = read_options(args, os.environ) | {"--kv-recall": OFF}
    values["--kv-evict"] = values["--kv-evict"] or "triattention"
    evict = make_eviction(values, read_options(args, {}))
    last = caches[-1]
    if evict is not None and last.config is not None:
        name = f"{last.name}, {evict.policy.name} {evict.budget}"
        caches.append(BenchedCache(name, replace(last.config, evict=evict)))
    return caches


def _measure_figures(
    args: argparse.Namespace, prepare: Callable[[], None] = lambda: None
) -> tuple[list[Figure], dict[str, str]]:
    """Measure the model at every type and context, and write it; also returns what was skipped, with the reason.

    `prepare` is called once, when it is certain that the contexts fit into the model.
    """
    figures: list[Figure] = []
    skipped: dict[str, str] = {}
    text, name = load_text(), short_name(args.model)
    for number, dtype in enumerate(args.dtypes or [None]):
        trust = {"trust_remote_code": args.trust_remote_code}
        options = {"dequantize": args.dequantize, "tokenizer_config": trust, **trust}
        model, tokenizer = load(args.model, dtype=dtype, **options)
        facts = model_facts(model)
        caches, unsupported = _without_unsupported(_caches_to_compare(args), model)
        calibrate_model(
            model, tokenizer, *(cache.config for cache in caches if cache.config is not None), name=args.model
        )
        ids = tokenizer.encode(text)
        contexts = _contexts(args, facts.positions, skipped)
        if number == 0:
            prepare()
        with progress_bar("measuring", len(contexts) * args.rounds * len(caches)) as advance:
            for tokens in contexts:
                measured = measure_model(
                    model,
                    (ids * (1 + tokens // len(ids)))[:tokens],
                    caches,
                    dtype=dtype or facts.slots[0].dtype,
                    batches=sorted({1, *args.batches}),
                    max_tokens=args.max_tokens,
                    rounds=args.rounds,
                    prefill_rounds=min(args.prefill_rounds or args.rounds, args.rounds),
                    step=args.step,
                    skipped=skipped,
                    advance=advance,
                )
                for title, columns, rows in figure_tables(measured):
                    shown = table(title, *columns)
                    for row in rows:
                        shown.add_row(*row)
                    _screen(args).print(shown)
                figures += measured
                if args.json != STDOUT:  # an interrupted run has written what it measured
                    _write(figures_as_dict(name, figures, skipped | unsupported), args.json, quiet=True)
        skipped |= unsupported
    for what, reason in skipped.items():
        stderr.print(f"skipped: {what}: {reason}", soft_wrap=True, markup=False)
    _write(figures_as_dict(name, figures, skipped), args.json)
    _write(markdown_tables(figures) + "\n", args.markdown)
    return figures, skipped


def _contexts(args: argparse.Namespace, limit: int | None, skipped: dict[str, str]) -> list[int]:
    """Return the contexts for which the model has positions, with the generated tokens of each batch."""
    contexts: list[int] = args.tokens or MODEL_TOKENS
    needed = 2 * args.max_tokens + 2
    allowed = [tokens for tokens in contexts if limit is None or tokens + needed <= limit]
    for tokens in (tokens for tokens in contexts if tokens not in allowed):
        skipped[f"{tokens:,} tokens"] = f"the model has {limit:,} positions, and the answers need {needed}"
    if not allowed:
        raise ConfigError(f"--tokens {contexts} all exceed the model's {limit:,} positions less {needed} for answers.")
    return allowed


def _without_unsupported(caches: list[BenchedCache], model: Any) -> tuple[list[BenchedCache], dict[str, str]]:
    """Return the caches that mlx-lm can run, and why it cannot run the others."""
    others = [type(cache).__name__ for cache in native_caches(model) if not isinstance(cache, KVCache)]
    if not others:
        return caches, {}
    reason = f"mlx-lm does not quantize a {others[0]}"
    unsupported = {cache.name: reason for cache in caches if cache.kv_bits is not None}
    return [cache for cache in caches if cache.kv_bits is None], unsupported


def _screen(args: argparse.Namespace) -> Any:
    """Return the console for tables: stderr if stdout has another output."""
    return stderr if STDOUT in (args.json, args.markdown, args.report) else stdout


def _write(content: str | dict[str, Any], name: str | None, *, quiet: bool = False) -> None:
    """Write text, or data as JSON, to a file or to stdout; does nothing without a name."""
    text = content if isinstance(content, str) else json.dumps(content, indent=1) + "\n"
    if name == STDOUT:
        sys.stdout.write(text)
    elif name:
        with atomic_write(name) as temporary:
            Path(temporary).write_text(text, encoding="utf-8")
        if not quiet:
            stderr.print(f"written: {name}", soft_wrap=True, markup=False)
