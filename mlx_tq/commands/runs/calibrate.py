"""The work of `mlx_tq.calibrate`: query statistics."""

import argparse
import sys
from pathlib import Path

from mlx_tq.commands.args import check_writable
from mlx_tq.commands.asking import measure
from mlx_tq.commands.calibrating import queries_of_questions, queries_of_text, save_queries
from mlx_tq.commands.loading import load_chosen
from mlx_tq.commands.needles.haystack import load_text
from mlx_tq.commands.progress import prefill_progress
from mlx_tq.errors import ConfigError
from mlx_tq.models import fingerprint
from mlx_tq.policies.calibration import check_replaceable
from mlx_tq.policies.calibrator import SKIP
from mlx_tq.sequence.known_queries import kept_queries, make_folder


def run(args: argparse.Namespace) -> int:
    """Calibrate; returns the exit code.

    Raises:
        MlxTqError: whatever stands in the way.
    """
    if args.tokens < 1:
        raise ConfigError(f"--tokens is {args.tokens}; it must be 1 or more, such as 4096.")
    if not 0 <= args.text_share <= 1:
        raise ConfigError(f"--text-share is {args.text_share:g}; it must be from 0 (questions) to 1 (the text alone).")
    if args.output is not None:
        _check(args.output)
    if args.losses:
        if args.output is not None:
            raise ConfigError("--losses are kept in the user's cache folder; drop -o.")
        measure(*load_chosen(args))
        return 0
    try:
        text = load_text() if args.text is None else Path(args.text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the text {args.text} cannot be read: {error}. Give a UTF-8 file.") from error
    model, tokenizer = load_chosen(args)
    path = args.output
    if path is None:
        path = kept_queries(fingerprint(model), covariance=args.covariance)
        make_folder(path)
        _check(path)
    if args.text_share == 1:
        ids = list(tokenizer.encode(text, add_special_tokens=False, verbose=False))[: args.tokens + SKIP]
        found = queries_of_text(model, ids, covariance=args.covariance)
        told = f"{found.tokens:,} tokens"
    else:
        with prefill_progress(what="reading and asking") as progress:
            options = {"text_share": args.text_share, "covariance": args.covariance, "progress": progress}
            found = queries_of_questions(model, tokenizer, text, args.tokens, **options)
        told = f"questions and answers of {found.tokens:,} tokens"
        told += f", {args.text_share:.0%} of the text," if args.text_share else ""
    save_queries(model, path, found)
    sys.stderr.write(f"statistics of {told} are in {path}\n")
    return 0


def _check(path: str | Path) -> None:
    check_writable("-o", str(path))
    check_replaceable(path)
