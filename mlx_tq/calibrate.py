"""`mlx_tq.calibrate`: gather a model's query statistics into a file, for eviction without a warm-up."""

import argparse
import sys
from collections.abc import Sequence

from mlx_tq.cli.frame import run_command
from mlx_tq.cli.model_args import add_model_arguments
from mlx_tq.cli.parser import command_parser


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `mlx_tq.calibrate`."""
    parser = command_parser(
        "calibrate",
        "Gather a model's query statistics for eviction (--kv-calibration), for one --dtype.",
    )
    add_model_arguments(parser, adapter=False)
    parser.add_argument("--text", metavar="FILE", help="text to read (default: WikiText-2's test split, an excerpt)")
    parser.add_argument("--tokens", type=int, metavar="N", help="that are read (default: 4096)")
    parser.add_argument(
        "--text-share",
        type=float,
        metavar="SHARE",
        help="of the text's own queries beside those of questions about it and their answers: 0 for questions alone, "
        "1 for the text alone (default: 0.25)",
    )
    parser.add_argument(
        "--covariance",
        action="store_true",
        help="also the covariance, for --kv-evict expected_attention",
    )
    parser.add_argument(
        "--losses",
        action="store_true",
        help="instead measure what each layer loses on the text, for --kv-mean-bits, and keep it in the user's cache "
        "folder",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="safetensors file to write (default: the file in the user's cache that --kv-calibration auto reads)",
    )
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    return run_command("calibrate", build_parser(), "mlx_tq.cli.runs.calibrate", words)


if __name__ == "__main__":
    sys.exit(main())
