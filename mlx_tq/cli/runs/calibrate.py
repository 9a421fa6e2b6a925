"""The work of `mlx_tq.calibrate`: query statistics."""

import argparse
import sys
from pathlib import Path

from mlx_tq.cli.args import check_writable
from mlx_tq.cli.asking import measure
from mlx_tq.cli.calibrating import TEXT_SHARE, TOKENS, queries_of_questions, queries_of_text, save_queries
from mlx_tq.cli.haystack import load_text
from mlx_tq.cli.loading import load_chosen
from mlx_tq.cli.losing import TOKENS as LOSS_TOKENS
from mlx_tq.cli.progress import prefill_progress
from mlx_tq.errors import ConfigError
from mlx_tq.models import fingerprint
from mlx_tq.policies.calibration import SKIP, check_replaceable
from mlx_tq.prompt_cache.known_queries import kept_queries, make_folder


def run(args: argparse.Namespace) -> int:
    """Calibrate; returns the exit code.

    Raises:
        MlxTqError: whatever stands in the way.
    """
    if args.losses:
        _refuse_idle(args)
        text = _text(args)
        measure(*load_chosen(args), text)
        return 0
    tokens = TOKENS if args.tokens is None else args.tokens
    share = TEXT_SHARE if args.text_share is None else args.text_share
    if tokens < 1:
        raise ConfigError(f"--tokens is {tokens}; it must be 1 or more, such as {TOKENS}.")
    if not 0 <= share <= 1:
        raise ConfigError(f"--text-share is {share:g}; it must be from 0 (questions) to 1 (the text alone).")
    if args.output is not None:
        _check(args.output)
    text = _text(args)
    model, tokenizer = load_chosen(args)
    path = args.output
    if path is None:
        path = kept_queries(fingerprint(model), covariance=args.covariance)
        make_folder(path)
        _check(path)
    if share == 1:
        ids = list(tokenizer.encode(text, add_special_tokens=False, verbose=False))[: tokens + SKIP]
        found = queries_of_text(model, ids, covariance=args.covariance)
        told = f"{found.tokens:,} tokens"
    else:
        with prefill_progress(what="reading and asking") as progress:
            options = {"text_share": share, "covariance": args.covariance, "progress": progress}
            found = queries_of_questions(model, tokenizer, text, tokens, **options)
        told = f"questions and answers of {found.tokens:,} tokens"
        told += f", {share:.0%} of the text," if share else ""
    save_queries(model, path, found)
    sys.stderr.write(f"statistics of {told} are in {path}\n")
    return 0


def _refuse_idle(args: argparse.Namespace) -> None:
    """Raise where a flag is for statistics alone."""
    flags = {"--tokens": args.tokens, "--text-share": args.text_share, "--covariance": args.covariance or None}
    if idle := [flag for flag, value in flags.items() if value is not None]:
        raise ConfigError(f"{idle[0]} is given, but --losses measures on {LOSS_TOKENS} tokens of the text; drop it.")
    if args.output is not None:
        raise ConfigError("--losses are kept in the user's cache folder; drop -o.")


def _text(args: argparse.Namespace) -> str:
    try:
        return load_text() if args.text is None else Path(args.text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the text {args.text} cannot be read: {error}. Give a UTF-8 file.") from error


def _check(path: str | Path) -> None:
    check_writable("-o", str(path))
    check_replaceable(path)
