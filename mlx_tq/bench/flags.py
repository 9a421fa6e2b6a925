"""The flags of `mlx_tq.bench`."""

import argparse

from mlx_tq.cli.args import BUDGET, CALIBRATION, EVICT, add_backend_argument, field_of
from mlx_tq.cli.names import DTYPES, PROFILES
from mlx_tq.cli.parser import command_parser

KV_BITS = (8, 4)
# Flags that say something of one layer or of a whole model alone, and where the parser keeps them.
OF_A_LAYER = {flag: field_of(flag) for flag in ("--query-heads", "--kv-heads", "--head-dim")}
OF_A_MODEL = {
    flag: field_of(flag)
    for flag in (
        "--markdown",
        "--batches",
        "--max-tokens",
        "--kv-bits",
        EVICT.flag,
        BUDGET.flag,
        CALIBRATION.flag,
        "--dequantize",
    )
} | {"--prefill-step-size": "step"}


def build_parser() -> argparse.ArgumentParser:
    """Build the parser: what is measured, on what, and where the figures go."""
    parser = command_parser(
        "bench",
        "Measure speed and memory of compressed caches against mlx-lm's own, in one run: one layer's attention, or "
        "with --model a whole model.",
    )
    add = parser.add_argument
    add("--model", help="measure this model: folder, hub name, .gguf file or smollm2 (default: one layer's attention)")
    add("--trust-remote-code", action="store_true", help="let the tokenizer run its own code")
    add("--dequantize", action="store_true", help="make the model's packed weights dense")
    add(
        "--tokens",
        type=int,
        nargs="+",
        metavar="N",
        help="contexts (default: 2048 8192 32768; of a model 1024 4096 16384, as far as it allows)",
    )
    add(
        "--dtypes",
        nargs="+",
        metavar="TYPE",
        help=f"types of the model: {', '.join(DTYPES)} (default: all three; of a model that of its weights)",
    )
    add(
        "--profiles",
        nargs="+",
        default=["safe", "balanced", "small"],
        metavar="NAME",
        help=f"profiles to time: {', '.join(PROFILES)}",
    )
    add("--rounds", type=int, default=5, metavar="N", help="times that each arm is measured")
    add("--json", metavar="FILE", help="write the figures to FILE; - is standard output (default: a table alone)")
    add("--markdown", metavar="FILE", help="write a model's tables to FILE; - is standard output (default: none)")
    add(
        "--report",
        metavar="FILE",
        help="test this machine, tune it, measure --model (default: the embedded one), and write all of it to FILE, "
        "in Markdown, to attach to an issue",
    )
    add("--tune", action="store_true", help="measure this machine's thresholds and keep them, instead")
    model = parser.add_argument_group("a model")
    add = model.add_argument
    add("--batches", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N", help="answers at once")
    add("--max-tokens", "-m", type=int, default=32, metavar="N", help="tokens of an answer")
    add(
        "--kv-bits",
        type=int,
        nargs="*",
        choices=KV_BITS,
        default=KV_BITS,
        metavar="N",
        help="mlx-lm's quantised caches to time: 8, 4 or none; a CPU reads long prompts into them for minutes",
    )
    add("--prefill-step-size", dest="step", type=int, default=2048, metavar="N", help="tokens read at a time")
    for option, default in ((EVICT, "triattention; none leaves the arm out"), (BUDGET, "50%%"), (CALIBRATION, "auto")):
        text = f"of the last profile, once more: {option.help.partition(' (default')[0]} (default: {default})"
        add(option.flag, metavar=option.field.upper(), help=text)
    layer = parser.add_argument_group("one layer")
    add = layer.add_argument
    add("--query-heads", type=int, default=8, metavar="N", help="heads of queries")
    add("--kv-heads", type=int, default=2, metavar="N", help="heads of keys and values")
    add("--head-dim", type=int, default=128, metavar="N", help="numbers in each head's vectors")
    add_backend_argument(parser)
    return parser
