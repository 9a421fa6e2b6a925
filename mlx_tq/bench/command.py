"""What `mlx_tq.bench` measures by its flags: one layer, a whole model, or the machine's thresholds."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mlx_lm.models.cache import KVCache
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mlx_tq.bench.flags import OF_A_LAYER, OF_A_MODEL, build_parser
from mlx_tq.bench.layer import Shape, Timing, layer_table, measure_layer
from mlx_tq.bench.model import Arm, Figure, measure_model
from mlx_tq.bench.report import data, report
from mlx_tq.bench.tables import by_context, markdown, model_table
from mlx_tq.cli.args import check_writable, evict_from_args
from mlx_tq.cli.asking import ask_beforehand
from mlx_tq.cli.environment import environment
from mlx_tq.cli.needles.haystack import load_text
from mlx_tq.cli.runs.doctor import all_checks
from mlx_tq.cli.screen import console, results, table
from mlx_tq.config import PROFILES
from mlx_tq.errors import ConfigError
from mlx_tq.files import atomic_write
from mlx_tq.integration.known_models import model_facts
from mlx_tq.integration.probe import native_caches
from mlx_tq.kernels import backend, thresholds
from mlx_tq.kernels.thresholds import KernelThresholds
from mlx_tq.kernels.tuning import tune
from mlx_tq.models import load

STDOUT = "-"
LAYER_TOKENS = [2048, 8192, 32768]
LAYER_DTYPES = ["float16", "bfloat16", "float32"]
MODEL_TOKENS = [1024, 4096, 16384]
EMBEDDED = "embedded"
# Of what leaves where --kv-evict and --kv-budget do not say.
EVICT, BUDGET = "triattention", "50%"


def run(args: argparse.Namespace) -> int:
    """Measure, show and write; returns the exit code.

    Raises:
        ConfigError: an unknown profile or type, a count below 1, a file that cannot be written, or no context that
            the model allows.
        UnsupportedModelError: the model cannot run on compressed caches.
    """
    _check(args)
    if args.report is not None:
        return _report(args)
    if args.tune:
        return _tune(args)
    if args.model is not None:
        return _model(args)
    return _layer(args)


def _check(args: argparse.Namespace) -> None:
    unknown = set(args.profiles) - set(PROFILES)
    if unknown:
        raise ConfigError(f"profiles {sorted(unknown)} are unknown; valid are {', '.join(PROFILES)}.")
    if set(args.dtypes or ()) - set(LAYER_DTYPES):
        raise ConfigError(f"types {args.dtypes} are not all known; valid are {', '.join(LAYER_DTYPES)}.")
    counts = [*(args.tokens or ()), *args.batches, args.rounds, args.kv_heads, args.step]
    if min(counts) < 1 or args.query_heads % args.kv_heads:
        raise ConfigError(
            "tokens, batches, rounds and heads must be 1 or more, and query heads a multiple of KV heads."
        )
    if args.max_tokens < 2:
        raise ConfigError(f"--max-tokens is {args.max_tokens}; it must be 2 or more, for a rate to be measured.")
    for flag, path in (("--json", args.json), ("--markdown", args.markdown), ("--report", args.report)):
        if path not in (None, STDOUT):
            check_writable(flag, path, "file")
    _refuse_idle(args)


def _refuse_idle(args: argparse.Namespace) -> None:
    """Raise where a flag would have no effect.

    Raises:
        ConfigError: one would not.
    """
    whole = args.model is not None or args.report is not None
    if args.tune and whole:
        raise ConfigError("--tune measures no model, and --report tunes by itself. Drop --tune.")
    parser = build_parser()
    for flag, field in (OF_A_LAYER if whole else OF_A_MODEL).items():
        if getattr(args, field) != parser.get_default(field):
            kind, remedy = ("one layer", "drop it") if whole else ("a model", "add --model, or drop it")
            raise ConfigError(f"{flag} is of the measurement of {kind}: {remedy}.")


def _layer(args: argparse.Namespace) -> int:
    shape = Shape(args.query_heads, args.kv_heads, args.head_dim)
    profiles = {name: PROFILES[name] for name in args.profiles}
    timings: list[Timing] = []
    for dtype in args.dtypes or LAYER_DTYPES:
        for tokens in args.tokens or LAYER_TOKENS:
            measured = measure_layer(shape, tokens, dtype, profiles, args.rounds)
            (console if args.json == STDOUT else results).print(layer_table(measured))
            timings += measured
    if args.json:
        shown = {"shape": asdict(shape), "environment": environment(), "timings": [asdict(t) for t in timings]}
        _write(json.dumps(shown, indent=1) + "\n", args.json)
    return 0


def _model(args: argparse.Namespace) -> int:
    figures, left_out = _measure(args)
    _write_figures(args, figures, left_out)
    return 0


def _write_figures(args: argparse.Namespace, figures: list[Figure], left_out: dict[str, str]) -> None:
    if args.json:
        _write(_as_json(args, figures, left_out), args.json)
    if args.markdown:
        _write(markdown(figures) + "\n", args.markdown)


def _report(args: argparse.Namespace) -> int:
    checks = all_checks(kernels=backend.current() != "reference")
    best: list[KernelThresholds] = []
    figures, left_out = _measure(args, lambda: best.append(_tuned(args)))
    _write_figures(args, figures, left_out)
    _write(report(args.model or EMBEDDED, checks, best[0], figures, left_out), args.report)
    return 0 if all(check.passed for check in checks) else 1


def _tune(args: argparse.Namespace) -> int:
    best = _tuned(args)
    if args.json:
        _write(json.dumps({"environment": environment(), "thresholds": asdict(best)}, indent=1) + "\n", args.json)
    return 0


def _tuned(args: argparse.Namespace) -> KernelThresholds:
    """Measure this machine's thresholds, keep and show them."""
    shown = table(
        f"thresholds, {thresholds.machine()}",
        "threshold",
        "value",
        "seconds, or of packed_queries and short: times the other way",
    )
    measured = list(tune(args.tokens or LAYER_TOKENS, args.rounds))
    for name, value, figure, _ in measured:
        shown.add_row(name, str(value), f"{figure:.3g}")
    best = measured[-1][-1]
    path = thresholds.write(best)
    (console if STDOUT in (args.json, args.report) else results).print(shown)
    console.print(f"{best}\nis taken here from now on: {path}", soft_wrap=True)
    return best


def _arms(args: argparse.Namespace) -> list[Arm]:
    """mlx-lm's caches, each profile, and the last profile with tokens that leave."""
    arms = [Arm("off"), *(Arm(f"kv-bits {bits}", kv_bits=bits) for bits in args.kv_bits)]
    arms += [Arm(name, PROFILES[name]) for name in args.profiles if not PROFILES[name].is_off]
    evict = evict_from_args(argparse.Namespace(**{**vars(args), "kv_evict": args.kv_evict or EVICT}))
    if evict is not None and arms[-1].config is not None:
        evict = evict if args.kv_budget else replace(evict, budget=BUDGET)
        name = f"{arms[-1].name}, {evict.policy.name} {evict.budget}"
        arms.append(Arm(name, replace(arms[-1].config, evict=evict)))
    return arms


def _measure(
    args: argparse.Namespace, prepare: Callable[[], None] = lambda: None
) -> tuple[list[Figure], dict[str, str]]:
    """Figures of the model at every type and context, and what could not be run, with the reason.

    Args:
        args: of the command.
        prepare: called once, when it is known that they can be met.
    """
    figures: list[Figure] = []
    left_out: dict[str, str] = {}
    text = load_text()
    for number, dtype in enumerate(args.dtypes or [None]):
        options = {"trust_remote_code": args.trust_remote_code}
        model, tokenizer = load(args.model, dtype=dtype, dequantize=args.dequantize, tokenizer_config=options)
        facts = model_facts(model)
        arms, refused = _possible(_arms(args), model)
        ask_beforehand(model, tokenizer, *(arm.config for arm in arms if arm.config is not None))
        ids = tokenizer.encode(text)
        contexts = _contexts(args, facts.positions, left_out)
        if number == 0:
            prepare()
        with _progress(len(contexts) * args.rounds * len(arms)) as advance:
            for tokens in contexts:
                measured = measure_model(
                    model,
                    (ids * (1 + tokens // len(ids)))[:tokens],
                    arms,
                    dtype=dtype or facts.slots[0].dtype,
                    batches=sorted({1, *args.batches}),
                    answer=args.max_tokens,
                    rounds=args.rounds,
                    step=args.step,
                    left_out=left_out,
                    advance=advance,
                )
                ((title, group),) = by_context(measured)
                (console if STDOUT in (args.json, args.markdown, args.report) else results).print(
                    model_table(title, group)
                )
                figures += measured
                if args.json not in (None, STDOUT):  # a run that is cut off leaves what it has measured
                    _put(_as_json(args, figures, left_out | refused), args.json)
        left_out |= refused
    for what, why in left_out.items():
        console.print(f"left out: {what}: {why}", soft_wrap=True, markup=False)
    return figures, left_out


def _contexts(args: argparse.Namespace, limit: int | None, left_out: dict[str, str]) -> list[int]:
    """Contexts that the model's positions allow with an answer of each batch."""
    wanted: list[int] = args.tokens or MODEL_TOKENS
    needed = 2 * args.max_tokens + 1
    allowed = [tokens for tokens in wanted if limit is None or tokens + needed <= limit]
    for tokens in wanted:
        if tokens not in allowed:
            left_out[f"{tokens:,} tokens"] = f"the model has {limit:,} positions, and the answers need {needed}"
    if not allowed:
        raise ConfigError(f"--tokens {wanted} all exceed the model's {limit:,} positions less {needed} for answers.")
    return allowed


def _possible(arms: list[Arm], model: Any) -> tuple[list[Arm], dict[str, str]]:
    """Arms that mlx-lm can run, and why not the others."""
    sliding = [type(cache).__name__ for cache in native_caches(model) if not isinstance(cache, KVCache)]
    if not sliding:
        return arms, {}
    refused = {arm.name: f"mlx-lm does not quantise a {sliding[0]}" for arm in arms if arm.kv_bits is not None}
    return [arm for arm in arms if arm.kv_bits is None], refused


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar of the runs; yields what is called after each."""
    if not console.is_terminal:
        yield lambda: None
        return
    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task("runs", total=total)
        yield lambda: shown.advance(task)


def _as_json(args: argparse.Namespace, figures: list[Figure], left_out: dict[str, str]) -> str:
    return json.dumps(data(args.model, figures, left_out), indent=1) + "\n"


def _put(text: str, name: str) -> None:
    with atomic_write(name) as temporary:
        Path(temporary).write_text(text, encoding="utf-8")


def _write(text: str, name: str) -> None:
    if name == STDOUT:
        sys.stdout.write(text)
        return
    _put(text, name)
    console.print(f"written: {name}", soft_wrap=True, markup=False)
