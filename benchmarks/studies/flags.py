"""Flags, text and results that the studies share with `mlx_tq.evaluate`."""

import argparse
import sys
from collections.abc import Callable

from mlx_tq.cli.inputs import read_text
from mlx_tq.cli.loading import load_model
from mlx_tq.cli.parser import CommandParser, add_cache_arguments, add_model_arguments, command_parser
from mlx_tq.cli.runner import run_command
from mlx_tq.config import KVConfig
from mlx_tq.evaluate import add_arm_arguments
from mlx_tq.evaluate.arms import Arm
from mlx_tq.evaluate.measurements import settings_of
from mlx_tq.evaluate.results import Results
from mlx_tq.evaluate.teacher_forced import cut_chunks


def study_parser(description: str, length: int, profiles: str | None = None) -> CommandParser:
    parser = command_parser("study", description)
    add_model_arguments(parser, adapter=False)
    parser.add_argument("--text", metavar="FILE", help="text to evaluate (default: WikiText-2's test split)")
    parser.add_argument("--json", metavar="FILE", help="write the results as JSON; - is stdout")
    parser.add_argument("--length", type=int, default=length, metavar="N", help="tokens of the text")
    if profiles is not None:
        add_arm_arguments(parser, profiles)
    add_cache_arguments(parser)
    return parser


def run_study(name: str, parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], None]) -> None:
    """Parse the flags, run, and exit with the codes of mlx_tq's commands."""

    def work(args: argparse.Namespace) -> int:
        run(args)
        return 0

    parser.prog = f"python -m benchmarks.studies.{name}"
    sys.exit(run_command(parser, work))


def open_results(
    args: argparse.Namespace, name: str, names: tuple[str, ...], arms: list[Arm], *, resume: bool = False
) -> Results:
    return Results(args.json, name, settings_of(args, names, arms), resume=resume)


def load_with_ids(args: argparse.Namespace, *configs: KVConfig):
    """Return the model, and the first --length tokens of the text."""
    model, tokenizer = load_model(args, *configs)
    (ids,) = cut_chunks(tokenizer, read_text(args.text), 1, args.length)
    return model, ids
