"""`mlx_tq.bench`: measure speed and memory against mlx-lm's own caches, and this machine's kernel thresholds."""

import argparse

from mlx_tq.cli.options import BACKEND, DTYPES, NONE, OPTIONS, PROFILES, STDOUT, check_flags, check_writable
from mlx_tq.cli.parser import CommandParser, add_dequantize_argument, add_option, command_parser
from mlx_tq.cli.runner import command_main
from mlx_tq.errors import ConfigError

KV_BITS = (8, 4)


def run(args: argparse.Namespace) -> int:
    unknown = set(args.profiles) - set(PROFILES)
    if unknown:
        raise ConfigError(f"profiles {sorted(unknown)} are unknown; valid are {', '.join(PROFILES)}.")
    if set(args.dtypes or ()) - set(DTYPES):
        raise ConfigError(f"types {args.dtypes} are not all known; valid are {', '.join(DTYPES)}.")
    counts = [
        *(args.tokens or ()),
        *args.batches,
        args.rounds,
        args.query_heads,
        args.kv_heads,
        args.head_dim,
        args.step,
    ]
    counts += [] if args.prefill_rounds is None else [args.prefill_rounds]
    if min(counts) < 1 or args.query_heads % args.kv_heads:
        raise ConfigError(
            "tokens, batches, rounds and heads must be 1 or more, and query heads a multiple of KV heads."
        )
    if args.max_tokens < 2:
        raise ConfigError(f"--max-tokens is {args.max_tokens}; it must be 2 or more, for a rate to be measured.")
    for flag, path in (("--json", args.json), ("--markdown", args.markdown), ("--report", args.report)):
        if path not in (None, STDOUT):
            check_writable(flag, path, "file")
    check_flags(args, [] if args.kv_evict == NONE else ["--kv-evict"])  # by default triattention

    from mlx_tq.cli.startup import check_model

    check_model(args)

    from mlx_tq.bench.runs import run_benchmarks

    return run_benchmarks(args)


def build_parser() -> CommandParser:
    parser = command_parser(
        "bench",
        "Measure speed and memory of compressed caches against mlx-lm's own, in one run: the attention of one layer, "
        "or with --model a whole model.",
    )
    add = parser.add_argument
    model = "folder, hub name, .gguf file or smollm2 (default: measure the attention of one layer)"
    add("--model", help=f"measure this model: {model}")
    add("--trust-remote-code", action="store_true", help="allow the model and its tokenizer to run their own code")
    add_dequantize_argument(parser)
    tokens = "context lengths (default: 2048 8192 32768; with --model 1024 4096 16384, up to the model's limit)"
    add("--tokens", type=int, nargs="+", metavar="N", help=tokens)
    dtypes = f"types of the model: {', '.join(DTYPES)} (default: all three; with --model that of its weights)"
    add("--dtypes", nargs="+", metavar="TYPE", help=dtypes)
    profiles = f"profiles to time: {', '.join(PROFILES)}"
    add("--profiles", nargs="+", default=["safe", "balanced", "small"], metavar="NAME", help=profiles)
    add("--rounds", type=int, default=5, metavar="N", help="repetitions of each measurement")
    add("--json", metavar="FILE", help="write the figures to FILE; - is stdout (default: a table only)")
    add("--markdown", metavar="FILE", help="write a model's tables to FILE; - is stdout (default: none)")
    add(
        "--report",
        metavar="FILE",
        help="test this machine, tune it, measure --model (default: needle), and write a Markdown report to "
        "attach to an issue",
    )
    add("--tune", action="store_true", help="only measure and save the kernel thresholds of this machine")
    add = parser.add_argument_group("a model").add_argument
    add("--batches", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N", help="batch sizes")
    add("--max-tokens", "-m", type=int, default=32, metavar="N", help="tokens to generate")
    prefill_rounds = "rounds that also prefill; later ones decode from copies (default: as --rounds)"
    add("--prefill-rounds", type=int, metavar="N", help=prefill_rounds)
    kv_bits = "mlx-lm's quantized caches to time: 8, 4, or none (the flag alone); on a CPU without their prefill"
    add("--kv-bits", type=int, nargs="*", choices=KV_BITS, default=KV_BITS, metavar="N", help=kv_bits)
    add("--prefill-step-size", dest="step", type=int, default=2048, metavar="N", help="tokens per prefill step")
    defaults = {"--kv-evict": "triattention; none skips eviction", "--kv-budget": "50%%", "--kv-calibration": "auto"}
    for flag, default in defaults.items():
        text = OPTIONS[flag].help.partition(" (default")[0]
        text = text.replace("eviction policy:", "policy to evict with on top of the last profile:")
        add(flag, metavar=OPTIONS[flag].metavar, help=f"{text} (default: {default})")
    add = parser.add_argument_group("one layer").add_argument
    add("--query-heads", type=int, default=8, metavar="N", help="query heads")
    add("--kv-heads", type=int, default=2, metavar="N", help="KV heads")
    add("--head-dim", type=int, default=128, metavar="N", help="dimension of a head")
    add_option(parser, BACKEND)
    return parser


main = command_main(build_parser, run)
