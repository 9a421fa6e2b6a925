"""`mlx_tq.generate`: mlx_lm.generate on a compressed KV cache."""

import argparse
import sys
from collections.abc import Sequence

from mlx_tq.cli.args import add_cache_arguments, add_rescue_arguments, parse_size
from mlx_tq.cli.frame import run_command
from mlx_tq.cli.model_args import add_model_arguments, add_sampling_arguments
from mlx_tq.cli.parser import command_parser


def _is_true(text: str) -> bool:
    """As mlx-lm reads --verbose."""
    return text.lower() not in ("false", "f")


def build_parser() -> argparse.ArgumentParser:
    """Every flag of mlx_lm.generate, with its default, and ours."""
    parser = command_parser(
        "generate", "Generate text with an mlx-lm model on a compressed KV cache.", "[-p PROMPT] [options]"
    )
    add_model_arguments(parser)
    add = parser.add_argument_group("prompt").add_argument
    add("--prompt", "-p", help="what to answer; - reads standard input (default: standard input)")
    add("--prompt-file", metavar="FILE", help="read the prompt from a file (default: none)")
    add("--image", nargs="+", default=(), metavar="FILE", help="images of the prompt's placeholders (default: none)")
    add("--system-prompt", metavar="TEXT", help="what stands before the prompt (default: none)")
    add("--prefill-response", metavar="TEXT", help="words that the answer begins with (default: none)")
    add("--chat-template-config", metavar="JSON", help="object of options of the chat template (default: {})")
    add("--ignore-chat-template", action="store_true", help="read the prompt as it is")
    add("--use-default-chat-template", action="store_true", help="the tokenizer's default template")
    add("--prompt-cache-file", metavar="FILE", help="go on from a file of cache_prompt (default: none)")

    add = (group := parser.add_argument_group("answer")).add_argument
    add("--max-tokens", "-m", type=int, default=100, metavar="N", help="of the answer; -1 is all that the model allows")
    add_sampling_arguments(group)
    add("--min-tokens-to-keep", type=int, default=1, metavar="N", help="that min-p leaves to choose from")
    add("--xtc-probability", type=float, default=0.0, metavar="P", help="how often XTC takes the likeliest tokens away")
    add("--xtc-threshold", type=float, default=0.1, metavar="P", help="probability above which XTC takes them")
    add("--seed", type=int, metavar="N", help="of the sampling (default: another one each time)")
    add("--extra-eos-token", nargs="+", default=(), metavar="TOKEN", help="tokens that also end it (default: none)")
    add("--json-schema", metavar="FILE", help="hold the answer to the JSON schema in a file (default: none)")
    add("--verbose", type=_is_true, default=True, metavar="T|F", help="plan and statistics on stderr")
    add("--json", action="store_true", help="print one JSON object instead of text")

    add = parser.add_argument_group("speed and memory").add_argument
    add("--prefill-step-size", type=int, default=2048, metavar="N", help="tokens of the prompt read at a time")
    add("--draft-model", metavar="MODEL", help="drafts tokens that the model then checks (default: none)")
    add("--num-draft-tokens", type=int, default=3, metavar="N", help="drafted at a time")
    add("--quantize-activations", "-qa", action="store_true", help="quantise activations as the layer's weights are")
    add(
        "--max-kv-size",
        type=int,
        metavar="N",
        help="size of mlx-lm's rotating cache, in place of ours (default: none)",
    )
    add("--kv-bits", type=int, metavar="N", help="bits of mlx-lm's quantised cache, in place of ours (default: none)")
    add("--kv-group-size", type=int, default=64, metavar="N", help="values that share a scale with --kv-bits")
    add("--quantized-kv-start", type=int, default=5000, metavar="N", help="token from which --kv-bits counts")
    add(
        "--kv-memory-limit",
        type=parse_size,
        metavar="SIZE",
        help="refuse a context whose cache exceeds this, such as 4GB (default: the free memory)",
    )
    add_cache_arguments(parser, recall=True, store=True, shadow=True)
    add_rescue_arguments(parser)
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    return run_command("generate", build_parser(), "mlx_tq.cli.runs.generate", words)


if __name__ == "__main__":
    sys.exit(main())
