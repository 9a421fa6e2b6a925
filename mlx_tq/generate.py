"""`mlx_tq.generate`: mlx_lm.generate on a compressed KV cache."""

import argparse
import sys

from mlx_tq.cli.inputs import read_prompt, read_schema
from mlx_tq.cli.options import PENALTIES, SAMPLING, Request, parse_json_object, parse_size
from mlx_tq.cli.parser import (
    CommandParser,
    add_cache_arguments,
    add_lookup_argument,
    add_memory_arguments,
    add_model_arguments,
    add_sampling_arguments,
    command_parser,
)
from mlx_tq.cli.runner import command_main
from mlx_tq.distributed.launch import is_launched


def build_parser() -> CommandParser:
    """Return the parser: every flag of mlx_lm.generate with its default, and ours."""
    parser = command_parser(
        "generate", "Generate text with an mlx-lm model on a compressed KV cache.", "[-p PROMPT] [options]"
    )
    add_cache_arguments(parser, recall=True, prefix_cache=True, shadow=True, rescue=True)
    add_model_arguments(group := parser.add_argument_group("model"))
    add_memory_arguments(group)
    add = parser.add_argument_group("prompt").add_argument
    add("--prompt", "-p", help="prompt; - reads standard input (default: standard input)")
    add("--prompt-file", metavar="FILE", help="read the prompt from a file (default: none)")
    add("--image", nargs="+", default=(), metavar="FILE", help="images for a vision model (default: none)")
    add("--system-prompt", metavar="TEXT", help="system prompt (default: none)")
    add("--prefill-response", metavar="TEXT", help="start of the response (default: none)")
    options = "options of the chat template"
    add("--chat-template-config", type=parse_json_object, default="{}", metavar="JSON", help=options)
    add("--ignore-chat-template", action="store_true", help="use the prompt without the chat template")
    no_effect = "accepted for compatibility with mlx_lm.generate; no effect"
    add("--use-default-chat-template", action="store_true", help=no_effect)
    add("--prompt-cache-file", metavar="FILE", help="continue a mlx_tq.cache_prompt file, on its model (default: none)")
    _add_generation_arguments(parser)
    add = (group := parser.add_argument_group("speed and memory")).add_argument
    add_lookup_argument(group)
    add("--prefill-step-size", type=int, default=2048, metavar="N", help="tokens per prefill step")
    add("--draft-model", metavar="MODEL", help="model for speculative decoding (default: none)")
    add("--num-draft-tokens", type=int, default=3, metavar="N", help="tokens drafted per step")
    add("--quantize-activations", "-qa", action="store_true", help="quantize activations to the mode of the weights")
    rotating = "size of mlx-lm's rotating cache, which is not compressed, instead of ours (default: none)"
    add("--max-kv-size", type=int, metavar="N", help=rotating)
    add("--kv-bits", type=int, metavar="N", help="bits of mlx-lm's quantized cache, instead of ours (default: none)")
    add("--kv-group-size", type=int, default=64, metavar="N", help="group size for --kv-bits")
    add("--quantized-kv-start", type=int, default=5000, metavar="N", help="step at which --kv-bits begins")
    limit = "refuse a context whose KV cache needs more than this, such as 4GB"
    limit += " (default: what prefill leaves of the free memory)"
    add("--kv-memory-limit", type=parse_size, metavar="SIZE", help=limit)
    return parser


def _add_generation_arguments(parser: CommandParser) -> None:
    add = (group := parser.add_argument_group("generation")).add_argument
    tokens = "maximum tokens to generate; -1 is up to the context limit"
    add("--max-tokens", "-m", type=int, default=100, metavar="N", help=tokens)
    add_sampling_arguments(group, (*SAMPLING, *PENALTIES))
    add("--min-tokens-to-keep", type=int, default=1, metavar="N", help="minimum candidates kept by min-p")
    add("--xtc-probability", type=float, default=0.0, metavar="P", help="probability of applying XTC sampling")
    add("--xtc-threshold", type=float, default=0.1, metavar="P", help="probability threshold of XTC sampling")
    add("--seed", type=int, metavar="N", help="random seed (default: a different one each time)")
    add("--extra-eos-token", nargs="+", default=(), metavar="TOKEN", help="more tokens that end it (default: none)")
    add("--json-schema", metavar="FILE", help="constrain the answer to the JSON schema in a file (default: none)")
    add("--verbose", type=_is_true, default=True, metavar="T|F", help="show plan and statistics on stderr")
    add("--json", action="store_true", help="print one JSON object instead of text")


def _is_true(text: str) -> bool:
    return text.lower() not in ("false", "f")  # as mlx-lm reads --verbose


def run(args: argparse.Namespace) -> int:
    request = Request.from_args(args)

    from mlx_tq.cli.startup import check_request

    request = check_request(request)
    # The first of several ranks reads, when all have joined.
    inputs = None if is_launched() else (read_prompt(args), read_schema(args))

    from mlx_tq.cli.answer import answer_request

    return answer_request(request, inputs)


main = command_main(build_parser, run)

if __name__ == "__main__":
    sys.exit(main())
