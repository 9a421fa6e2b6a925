"""`mlx_tq.cache_prompt`: prefill a prompt once and save its cache, from which generate continues, also mlx-lm's."""

import argparse
import sys

from mlx_tq.cli.inputs import read_prompt, read_share
from mlx_tq.cli.options import OFF, Request, check_writable
from mlx_tq.cli.parser import CommandParser, add_cache_arguments, add_model_arguments, command_parser
from mlx_tq.cli.runner import DONE, command_main


def build_parser() -> CommandParser:
    """Return the parser: the flags of mlx_lm.cache_prompt that apply, and ours."""
    parser = command_parser(
        "cache_prompt",
        "Prefill a prompt once and save its compressed KV cache.",
        "--prompt-cache-file FILE [-p PROMPT] [options]",
    )
    add_cache_arguments(parser, recall=True)
    add_model_arguments(parser.add_argument_group("model"))
    add = parser.add_argument_group("prompt").add_argument
    add("--prompt", "-p", help="prompt; - reads standard input (default: standard input)")
    add("--prompt-file", metavar="FILE", help="read the prompt from a file (default: none)")
    add("--prompt-cache-file", required=True, metavar="FILE", help=".safetensors file to write")
    keep = "prefill the prompt twice, and keep this share of the rows of all heads, such as 25%% (default: all)"
    add("--compact", metavar="SHARE", help=keep)
    decode = "convert this compressed cache for mlx-lm, instead of a prompt (default: none)"
    add("--decode", metavar="FILE", help=decode)
    add("--prefill-step-size", type=int, default=2048, metavar="N", help="tokens per prefill step")
    return parser


def run(args: argparse.Namespace) -> int:
    """Prefill the prompt, or decode a file, and save the cache; return the exit code. Errors leave no file."""
    request = Request.from_args(args)
    check_writable("--prompt-cache-file", args.prompt_cache_file)
    share = None if args.compact is None else read_share("--compact", args.compact)

    from mlx_tq.cli.startup import check_request

    check_request(request)
    prompt = "" if args.decode is not None else read_prompt(args)

    from mlx_tq.cli.prompt_caches import decode_file, prefill_prompt
    from mlx_tq.cli.screen import show_cache
    from mlx_tq.config import PROFILES
    from mlx_tq.prompt_cache.cache_file import check_replaceable, save_prompt_cache
    from mlx_tq.prompt_cache.statistics import cache_stats

    check_replaceable(args.prompt_cache_file, conversation=False)
    decodes = args.decode is not None
    model, caches, plan = decode_file(args) if decodes else prefill_prompt(request, prompt, share)
    config = PROFILES[OFF] if decodes else request.config
    save_prompt_cache(args.prompt_cache_file, caches, model=model, config=config)
    show_cache(cache_stats(caches, plan))
    return DONE


main = command_main(build_parser, run)

if __name__ == "__main__":
    sys.exit(main())
