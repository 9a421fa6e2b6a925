"""`mlx_tq.evaluate`: run one measurement, show it, keep it."""

import argparse
import hashlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_tq.cli.args import config_from_args
from mlx_tq.cli.asking import ask_beforehand
from mlx_tq.cli.loading import load_chosen
from mlx_tq.cli.needles.haystack import load_text
from mlx_tq.errors import ConfigError
from mlx_tq.evaluate import divergence, drift, formats, layers, needle, perplexity, spectrum, sweep, tables
from mlx_tq.evaluate.arms import OFF, Arm, arms_from_args, parse_arm, region_changes
from mlx_tq.evaluate.asked_runs import SETTINGS, check_numbers, run_asked, samples_of
from mlx_tq.evaluate.harness import command_line, evaluation, run_tasks
from mlx_tq.evaluate.passes import cut_chunks
from mlx_tq.evaluate.report import Results, progress
from mlx_tq.evaluate.scenes import questions
from mlx_tq.evaluate.settings import grid
from mlx_tq.evaluate.sweep_table import show_sweep


def run(args: argparse.Namespace) -> int:
    """Measure; returns the exit code.

    Raises:
        MlxTqError: whatever stands in the way.
    """
    if args.measurement == "lm-eval":
        return _lm_eval(args)
    if args.others:
        raise ConfigError(f"{' '.join(args.others)} stands behind --, which is for lm-eval. Leave it out.")
    text = _read_text(getattr(args, "text", None))
    measure = {
        "perplexity": _perplexity,
        "divergence": _divergence,
        "formats": _formats,
        "needle": _needle,
        "drift": _drift,
        "sweep": _sweep,
        "layers": _layers,
        "spectrum": _spectrum,
        **dict.fromkeys(SETTINGS, _asked),
    }[args.measurement]
    return measure(args, text)


def _read_text(path: str | None) -> str:
    if path is None:
        return load_text()
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the text {path} cannot be read: {error}. Give a UTF-8 file.") from error


def _results(args: argparse.Namespace, arms: list[Arm], names: tuple[str, ...], *, resume: bool = False) -> Results:
    """The results of a measurement under the settings called `names`."""
    settings = {"model": args.model or "embedded"}
    if hasattr(args, "text"):
        settings |= {"text": args.text or "embedded"}
        if args.text:  # a file can change, and what was read of another one must not be mixed in
            settings |= {"text_sha256": hashlib.sha256(Path(args.text).read_bytes()).hexdigest()}
    settings |= {name: getattr(args, name) for name in names}
    settings |= {} if args.dtype is None else {"dtype": args.dtype}
    settings["arms"] = {arm.name: arm.config.to_dict() for arm in arms}
    return Results(args.json, args.measurement, settings, resume=resume)


def _numbers(text: str, flag: str, least: int = 1) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} is {text!r}; write whole numbers like 500,1000.") from None
    if min(numbers) < least:
        raise ConfigError(f"{flag} is {text!r}; each must be {least} or more.")
    return numbers


def _perplexity(args: argparse.Namespace, text: str) -> int:
    arms = arms_from_args(args)
    results = _results(args, arms, ("chunks", "length", "step"))
    model, tokenizer = load_chosen(args, *(arm.config for arm in arms))
    chunks = cut_chunks(tokenizer, text, args.chunks, args.length)
    passes = 1 + sum(not arm.config.is_off for arm in arms)
    with progress("perplexity", passes * args.chunks * (args.length - 1)) as advance:
        rows = perplexity.measure_perplexity(model, chunks, arms, args.step, advance)
    for row in rows:
        results.add(row.name, asdict(row))
    tables.show_perplexity(results, rows)
    return 0


def _divergence(args: argparse.Namespace, text: str) -> int:
    arms = arms_from_args(args)
    results = _results(args, arms, ("chunks", "length", "step"))
    model, tokenizer = load_chosen(args, *(arm.config for arm in arms))
    chunks = cut_chunks(tokenizer, text, args.chunks, args.length)
    with progress("divergence", (1 + len(arms)) * args.chunks * (args.length - 1)) as advance:
        rows = divergence.measure_divergence(model, chunks, arms, args.step, advance)
    for row in rows:
        results.add(row.name, asdict(row))
    tables.show_divergence(results, rows)
    return 0


def _formats(args: argparse.Namespace, text: str) -> int:
    pairs = formats.pairs(args.keys, args.values, args.pairs, **region_changes(args))
    results = _results(args, pairs, ("chunks", "length", "step", "needle_length"), resume=True)
    model, tokenizer = load_chosen(args, *(pair.config for pair in pairs))
    chunks = cut_chunks(tokenizer, text, args.chunks, args.length)
    left = [pair for pair in pairs if pair.name not in results.rows]
    passes = len(left) + -(-len(left) // formats.TOGETHER)
    with progress("formats", passes * args.chunks * (args.length - 1)) as advance:
        for row in formats.measure_formats(model, chunks, left, args.step, advance):
            results.add(row.name, asdict(row))
    unasked = [pair for pair in pairs if not pair.config.is_off and not results.rows[pair.name].get("asked")]
    left = unasked if args.needles else []
    options = {"length": args.needle_length, "seeds": args.needles, "step": args.step}
    with progress("needles", len(left)) as advance:
        for name, counts in formats.find_needles(model, tokenizer, text, left, **options):
            results.add(name, {**results.rows[name], **counts})
            advance(1)
    rows = [formats.FormatRow(**results.rows[pair.name]) for pair in pairs]
    tables.show_formats(results, sorted(rows, key=lambda row: (row.nbytes, row.name)))
    return 0


def _layers(args: argparse.Namespace, text: str) -> int:
    arms = arms_from_args(args)
    results = _results(args, arms, ("length", "step", "against", "backend"))
    model, tokenizer = load_chosen(args, *(arm.config for arm in arms))
    (ids,) = cut_chunks(tokenizer, text, 1, args.length)
    found = []
    with progress("layers", 2 * len(arms) * args.length) as advance:
        for arm in arms:
            reference = _reference(args, model, arm)
            found.append(layers.measure_layers(layers.Side(model, arm), reference, ids, args.step, advance))
    for rows, predictions in found:
        for row in rows:
            results.add(f"{row.name} {row.layer}", asdict(row))
        results.add(predictions.name, asdict(predictions))
    tables.show_layers(results, args.against, found)
    return 0


def _reference(args: argparse.Namespace, model: Any, arm: Arm) -> layers.Side:
    """What --against names."""
    if args.against == "reference":
        return layers.Side(model, arm, "reference")
    if args.against == "float32":
        wide, _ = load_chosen(args)
        wide.set_dtype(mx.float32)
        return layers.Side(wide, arm)
    return layers.Side(model, parse_arm(args.against, **region_changes(args)))


def _spectrum(args: argparse.Namespace, text: str) -> int:
    results = _results(args, [], ("length",))
    model, tokenizer = load_chosen(args)
    (ids,) = cut_chunks(tokenizer, text, 1, args.length)
    rows = spectrum.measure_spectrum(model, ids)
    for row in rows:
        results.add(str(row.layer), asdict(row))
    tables.show_spectrum(results, rows)
    return 0


def _asked(args: argparse.Namespace, text: str) -> int:
    arms = arms_from_args(args)
    check_numbers(args)
    lengths = _numbers(args.lengths, "--lengths") if args.measurement == "ruler" else []
    results = _results(args, arms, SETTINGS[args.measurement], resume=True)
    model, tokenizer = load_chosen(args)
    return run_asked(args, model, tokenizer, samples_of(args, tokenizer, text, lengths), arms, results)


def _lm_eval(args: argparse.Namespace) -> int:
    arguments, module = command_line(args.model, args.others), evaluation()
    model, tokenizer = load_chosen(args)
    run_tasks(module, model, tokenizer, config_from_args(args), arguments)
    return 0


def _needle(args: argparse.Namespace, text: str) -> int:
    arms = arms_from_args(args)
    lengths = _numbers(args.lengths, "--lengths")
    depths = [_depth(part) for part in args.depths.split(",")]
    if args.seeds < 1 or args.max_tokens < 1:
        raise ConfigError(f"--seeds is {args.seeds} and --max-tokens {args.max_tokens}; both must be 1 or more.")
    results = _results(args, arms, ("lengths", "depths", "seeds", "step", "max_tokens"), resume=True)
    model, tokenizer = load_chosen(args, *(arm.config for arm in arms))
    with progress("needle", (1 + len(arms)) * len(lengths) * len(depths) * args.seeds) as advance:

        def report(cell: needle.Cell) -> None:
            results.add(cell.key, asdict(cell))
            advance(1)

        cells = needle.measure_needles(
            model,
            tokenizer,
            text,
            arms,
            lengths=lengths,
            depths=depths,
            seeds=range(args.seeds),
            step=args.step,
            max_tokens=args.max_tokens,
            known=results.rows.get,
            report=report,
        )
    tables.show_needles(results, cells)
    missed = any(cell.name != OFF.name and cell.verdict not in ("PASS", needle.VOID) for cell in cells)
    return 1 if args.strict and missed else 0


def _depth(text: str) -> float:
    try:
        return needle.DEPTHS[text] if text in needle.DEPTHS else float(text)
    except ValueError:
        raise ConfigError(f"depth {text!r} is unknown; write start, middle, end or a number from 0 to 1.") from None


def _sweep(args: argparse.Namespace, text: str) -> int:
    settings = grid(
        args.policies.split(","),
        [_percent(part) for part in args.retentions.split(",")],
        _numbers(args.granularities, "--granularities"),
        _numbers(args.triggers, "--triggers"),
        _numbers(args.prefixes, "--prefixes", least=0),
        once=args.once,
    )
    lengths, depths = _numbers(args.lengths, "--lengths"), [_depth(part) for part in args.depths.split(",")]
    base = config_from_args(args)
    reads, asks = args.chunks > 0, args.seeds > 0
    read = [*([args.length - 1] if reads else []), *(lengths if asks else [])]
    if not read:
        raise ConfigError(
            "--chunks and --seeds are both 0, so there is nothing to measure. Make one of them 1 or more."
        )
    sweep.check_settings(settings, base.window, read, args.warmup, args.step)
    sinks = max(_numbers(args.prefixes, "--prefixes", least=0))
    # Settings, texts and scenes are in the keys of the records: a file can take up more of them later.
    names = ("warmup", "step", "max_tokens")
    results = _results(args, [Arm("base", replace(base, sinks=sinks, evict=None))], names, resume=True)
    model, tokenizer = load_chosen(args)
    ask_beforehand(model, tokenizer, *(setting.config(base, args.warmup) for setting in settings))
    shared = {"warmup": args.warmup, "step": args.step, "known": results.rows.get}
    if reads:
        chunks = cut_chunks(tokenizer, text, args.chunks, args.length)
        in_rounds = [replace(setting, once=False) for setting in settings]
        passes = sweep.text_passes(in_rounds, results.rows.get, args.chunks, args.length)
        with progress("text", passes * args.chunks * (args.length - 1)) as advance:
            sweep.sweep_text(model, chunks, in_rounds, base, report=results.add, advance=advance, **shared)
    if asks:
        kinds = args.kinds.split(",")
        total = args.seeds * len(lengths) * (1 + len(settings)) * questions(kinds, len(depths))
        with progress("needles", total) as advance:

            def report(key: str, record: dict[str, Any], fresh: bool) -> None:
                if fresh:
                    results.add(key, record)
                advance(1)

            sweep.sweep_needles(
                model,
                tokenizer,
                text,
                settings,
                base,
                sinks=sinks,
                kinds=kinds,
                lengths=lengths,
                depths=depths,
                seeds=range(args.seeds),
                max_tokens=args.max_tokens,
                report=report,
                **shared,
            )
    show_sweep(results)
    return 0


def _percent(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        raise ConfigError(f"retention {text!r} is no number; write percents like 90,75,50.") from None
    if not 0 < share < 100:
        raise ConfigError(f"retention is {share:g} %; it must be above 0 and below 100.")
    return share


def _drift(args: argparse.Namespace, text: str) -> int:
    arms = arms_from_args(args)
    for arm in arms:
        drift.check_arm(arm)
    sizes = _numbers(args.steps, "--steps")
    results = _results(args, arms, ("length", "steps"))
    model, tokenizer = load_chosen(args, *(arm.config for arm in arms))
    (ids,) = cut_chunks(tokenizer, text, 1, args.length)
    with progress("drift", (1 + len(arms)) * (1 + len(sizes)) * args.length) as advance:
        rows = [row for arm in (OFF, *arms) for row in drift.measure_drift(model, ids, arm, sizes, advance)]
    for row in rows:
        results.add(f"{row.name} {row.step}", asdict(row))
    tables.show_drift(results, rows)
    return 0
