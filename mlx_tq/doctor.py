"""`mlx_tq.doctor`: test codecs and kernels, show versions and backend, and show which contexts fit into memory."""

import argparse
import json
import sys
from dataclasses import asdict

from mlx_tq.cli.options import BACKEND, check_flags, parse_size
from mlx_tq.cli.parser import CommandParser, add_model_arguments, add_option, command_parser
from mlx_tq.cli.runner import DONE, FAILED, command_main
from mlx_tq.errors import ConfigError

_BATCHES = [1, 2, 4, 8]
_CONTEXTS = [4096, 16384, 65536]


def build_parser() -> CommandParser:
    parser = command_parser("doctor", "Show versions and backend, and test every codec.")
    parser.add_argument("--verbose", action="store_true", help="show all versions and checks instead of one line")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    kernels = "check each kernel against a reference implementation"
    parser.add_argument("--kernels", action="store_true", help=kernels)
    add_option(parser, BACKEND)
    group = parser.add_argument_group("capacity")
    capacity = "show the longest context and the largest batch that fit, for each profile, instead"
    group.add_argument("--capacity", action="store_true", help=capacity)
    memory = "memory for weights and caches, such as 36GB (default: what the GPU may use, or this machine's memory)"
    group.add_argument("--memory", type=parse_size, metavar="SIZE", help=memory)
    add_model_arguments(group, adapter=False)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the self-tests, or show the capacity; return 1 if a test failed."""
    check_flags(args)
    if args.capacity:
        return _show_capacity(args)

    from mlx_tq.cli.diagnostics import environment, run_checks, summarize
    from mlx_tq.cli.fast_blas import blas_warning
    from mlx_tq.cli.screen import stdout, table, warn

    checks, versions = run_checks(kernels=args.kernels), environment()
    failed = [check for check in checks if not check.passed]
    if args.json:
        sys.stdout.write(json.dumps({"environment": versions, "checks": [asdict(check) for check in checks]}) + "\n")
        return FAILED if failed else DONE
    if args.verbose:
        sys.stdout.writelines(f"{name:10} {value}\n" for name, value in versions.items())
    rows = table("", "self-test", "measured", "expected", "")
    for check in checks if args.verbose else failed:
        rows.add_row(check.name, check.measured, check.expected, "ok" if check.passed else "FAILED")
    if rows.row_count:
        stdout.print(rows)
    sys.stdout.write(f"{summarize(checks, versions)}\n")
    if (warning := blas_warning()) is not None:
        warn(warning)
    return FAILED if failed else DONE


def _show_capacity(args: argparse.Namespace) -> int:
    from mlx_tq.cli.startup import check_model  # loads mlx, which --help does without

    check_model(args)

    from mlx_tq.cli.loading import outline_model  # likewise
    from mlx_tq.cli.screen import human_bytes, stdout, table  # likewise
    from mlx_tq.config import PROFILES  # likewise
    from mlx_tq.integration.probe import model_facts  # likewise
    from mlx_tq.kernels.gpu import usable_memory  # likewise
    from mlx_tq.prompt_cache.memory import PREFILL_STEP, capacities, context_limit, weights_nbytes  # likewise

    model = outline_model(args)
    memory = int(args.memory or usable_memory())
    weights, limit = weights_nbytes(model), context_limit(model)
    dtype = model_facts(model).slots[0].dtype
    if weights >= memory:
        raise ConfigError(
            f"the weights take {human_bytes(weights)}, but --memory is {human_bytes(memory)}. Use a model with fewer "
            "or smaller weights, or more memory."
        )
    contexts = [tokens for tokens in _CONTEXTS if tokens <= limit] or [limit]
    profiles = capacities(model, PROFILES, memory - weights, contexts=contexts, streams=_BATCHES)
    if args.json:
        report = {"memory_nbytes": memory, "weights_nbytes": weights, "dtype": dtype, "positions": limit}
        sys.stdout.write(json.dumps({**report, "profiles": [asdict(profile) for profile in profiles]}) + "\n")
        return DONE
    lengths = table("Longest context", "profile", *(f"batch of {n}" for n in _BATCHES))
    batches = table("Largest batch, with bytes per sequence", "profile", *(f"{tokens:,} tokens" for tokens in contexts))
    for profile in profiles:
        lengths.add_row(profile.profile, *(f"{tokens:,}" for tokens in profile.longest.values()))
        sizes = [f"{profile.streams[n]:,} x {human_bytes(profile.nbytes[n])}" for n in contexts]
        batches.add_row(profile.profile, *sizes)
    stdout.print(
        f"Memory {human_bytes(memory)}, weights {human_bytes(weights)}; {dtype}, at most {limit:,} tokens.\n"
        f"Estimates with --prefill-step-size {PREFILL_STEP}: layers with outlier keys need more; keep 10 % free."
    )
    stdout.print("", lengths, "", batches, sep="\n")
    return DONE


main = command_main(build_parser, run)

if __name__ == "__main__":
    sys.exit(main())
