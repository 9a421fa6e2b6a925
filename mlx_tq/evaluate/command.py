"""`mlx_tq.evaluate`: the subcommands, one for each measurement."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlx_tq.args import add_cache_arguments
from mlx_tq.errors import ConfigError
from mlx_tq.evaluate import divergence, drift, formats, needle, perplexity, tables
from mlx_tq.evaluate.arms import OFF, Arm, add_arm_arguments, arms_from_args, region_changes
from mlx_tq.evaluate.passes import check_reading, cut_chunks
from mlx_tq.evaluate.report import Results, progress
from mlx_tq.haystack import load_text
from mlx_tq.models import load


def build_parser() -> argparse.ArgumentParser:
    """One subcommand for each measurement."""
    parser = argparse.ArgumentParser(
        prog="mlx_tq.evaluate", description="Measure what a compressed KV cache costs in quality."
    )
    commands = parser.add_subparsers(dest="measurement", required=True, metavar="MEASUREMENT")

    def add(name: str, what: str, default_arms: str | None) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=what, description=what)
        made.add_argument("--model", help="folder or hub name (default: the embedded model)")
        made.add_argument("--trust-remote-code", action="store_true", help="let the tokenizer run its own code")
        made.add_argument("--text", metavar="FILE", help="text to read (default: WikiText-2's test split, an excerpt)")
        made.add_argument(
            "--json", metavar="FILE", help="write the results here too; - is stdout, instead of the table"
        )
        if default_arms is not None:
            add_arm_arguments(made, default_arms)
        add_cache_arguments(made)
        return made

    for name, what, arms in (
        ("perplexity", "perplexity of a text, against the fp16 cache", perplexity.DEFAULT_ARMS),
        ("divergence", "KL divergence and top-1 agreement with the fp16 cache", perplexity.DEFAULT_ARMS),
        ("formats", "every pair of formats: bytes, errors, divergence, perplexity", None),
    ):
        made = add(name, what, arms)
        made.add_argument("--chunks", type=int, default=3, help="pieces of the text (default: 3)")
        made.add_argument("--length", type=int, default=2048, help="tokens of each (default: 2048)")
        made.add_argument("--step", type=int, default=512, help="tokens read at a time (default: 512)")
        if name == "formats":
            made.add_argument("--keys", help="formats of keys, separated by commas (default: all)")
            made.add_argument("--values", help="formats of values (default: all)")

    made = add("needle", "find a fact planted in a long text", needle.DEFAULT_ARMS)
    made.add_argument("--lengths", default="1000,2000", help="tokens of the prompts (default: 1000,2000)")
    made.add_argument(
        "--depths", default="start,middle,end", help="start, middle, end or 0 to 1 (default: those three)"
    )
    made.add_argument("--seeds", type=int, default=3, help="cases for each length and depth (default: 3)")
    made.add_argument("--step", type=int, default=512, help="tokens read at a time (default: 512)")
    made.add_argument("--max-tokens", type=int, default=64, help="of an answer (default: 64)")
    made.add_argument("--strict", action="store_true", help="exit with 1 if a compressed cache misses a needle")

    made = add("drift", "what the number of tokens read at a time changes", "balanced")
    made.add_argument("--length", type=int, default=2048, help="tokens of the text (default: 2048)")
    made.add_argument("--steps", default="7,32,128,512,2048", help="tokens read at a time (default: 7,32,128,512,2048)")
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure; returns the exit code.

    Raises:
        MlxTqError: whatever stands in the way.

    """
    text = _read_text(args.text)
    measure = {
        "perplexity": _perplexity,
        "divergence": _divergence,
        "formats": _formats,
        "needle": _needle,
        "drift": _drift,
    }[args.measurement]
    return measure(args, text)


def _read_text(path: str | None) -> str:
    if path is None:
        return load_text()
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the text {path} cannot be read: {error}. Give a UTF-8 file.") from error


def _load(args: argparse.Namespace) -> tuple[Any, Any]:
    return load(
        args.model,
        tokenizer_config={"trust_remote_code": args.trust_remote_code},
        trust_remote_code=args.trust_remote_code,
    )


def _results(args: argparse.Namespace, arms: list[Arm], names: tuple[str, ...], *, resume: bool = False) -> Results:
    """The results of a measurement under the settings called `names`."""
    settings = {"model": args.model or "embedded", "text": args.text or "embedded"}
    settings |= {name: getattr(args, name) for name in names}
    settings["arms"] = {arm.name: asdict(arm.config) for arm in arms}
    return Results(args.json, args.measurement, settings, resume=resume)


def _numbers(text: str, flag: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} is {text!r}; write whole numbers like 500,1000.") from None
    if min(numbers) < 1:
        raise ConfigError(f"{flag} is {text!r}; each must be 1 or more.")
    return numbers


def _perplexity(args: argparse.Namespace, text: str) -> int:
    arms = arms_from_args(args)
    results = _results(args, arms, ("chunks", "length", "step"))
    model, tokenizer = _load(args)
    chunks = cut_chunks(tokenizer, text, args.chunks, args.length)
    check_reading(model, args.length, args.step, arms)
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
    model, tokenizer = _load(args)
    chunks = cut_chunks(tokenizer, text, args.chunks, args.length)
    with progress("divergence", (1 + len(arms)) * args.chunks * (args.length - 1)) as advance:
        rows = divergence.measure_divergence(model, chunks, arms, args.step, advance)
    for row in rows:
        results.add(row.name, asdict(row))
    tables.show_divergence(results, rows)
    return 0


def _formats(args: argparse.Namespace, text: str) -> int:
    pairs = formats.pairs(args.keys, args.values, **region_changes(args))
    results = _results(args, pairs, ("chunks", "length", "step"), resume=True)
    model, tokenizer = _load(args)
    chunks = cut_chunks(tokenizer, text, args.chunks, args.length)
    left = [pair for pair in pairs if pair.name not in results.rows]
    passes = len(left) + len({pair.config.key for pair in left})
    with progress("formats", passes * args.chunks * (args.length - 1)) as advance:
        for row in formats.measure_formats(model, chunks, left, args.step, advance):
            results.add(row.name, asdict(row))
    rows = [formats.FormatRow(**results.rows[pair.name]) for pair in pairs]
    tables.show_formats(results, sorted(rows, key=lambda row: (row.nbytes, row.name)))
    return 0


def _needle(args: argparse.Namespace, text: str) -> int:
    arms = arms_from_args(args)
    lengths = _numbers(args.lengths, "--lengths")
    depths = [_depth(part) for part in args.depths.split(",")]
    if args.seeds < 1 or args.max_tokens < 1:
        raise ConfigError(f"--seeds is {args.seeds} and --max-tokens {args.max_tokens}; both must be 1 or more.")
    results = _results(args, arms, ("lengths", "depths", "seeds", "step", "max_tokens"), resume=True)
    model, tokenizer = _load(args)
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


def _drift(args: argparse.Namespace, text: str) -> int:
    arms = arms_from_args(args)
    sizes = _numbers(args.steps, "--steps")
    results = _results(args, arms, ("length", "steps"))
    model, tokenizer = _load(args)
    (ids,) = cut_chunks(tokenizer, text, 1, args.length)
    with progress("drift", (1 + len(arms)) * (1 + len(sizes)) * args.length) as advance:
        rows = [row for arm in (OFF, *arms) for row in drift.measure_drift(model, ids, arm, sizes, advance)]
    for row in rows:
        results.add(f"{row.name} {row.step}", asdict(row))
    tables.show_drift(results, rows)
    return 0
