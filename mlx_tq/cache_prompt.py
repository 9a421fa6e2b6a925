"""`mlx_tq.cache_prompt`: prefill a prompt once and save its cache, from which generate continues, also mlx-lm's."""

import argparse
import sys
from collections.abc import Sequence

from mlx_tq.cli.options import OFF, Request, check_writable
from mlx_tq.cli.parser import CommandParser, add_cache_arguments, add_model_arguments, command_parser
from mlx_tq.cli.runner import DONE, run_command


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
    add(
        "--decode", metavar="FILE", help="convert this compressed cache for mlx-lm, instead of a prompt (default: none)"
    )
    add("--prefill-step-size", type=int, default=2048, metavar="N", help="tokens per prefill step")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    return run_command(build_parser(), run, words)


def run(args: argparse.Namespace) -> int:
    """Prefill the prompt and save its cache; return the exit code. After an error there is no file."""
    request = Request.from_args(args)
    check_writable("--prompt-cache-file", args.prompt_cache_file)

    import mlx.core as mx
    from mlx_lm.generate import generate_step

    from mlx_tq.cli.loading import load_model, make_caches
    from mlx_tq.cli.preflight import check_memory, check_positions, free_memory
    from mlx_tq.cli.prompts import read_prompt
    from mlx_tq.cli.screen import prefill_progress, show_cache, show_plan
    from mlx_tq.integration.probe import position_limit
    from mlx_tq.prompt_cache.cache_file import check_replaceable, save_prompt_cache
    from mlx_tq.prompt_cache.compressed import compressed
    from mlx_tq.prompt_cache.layer_group import compressed_caches
    from mlx_tq.prompt_cache.statistics import cache_stats
    from mlx_tq.session.text import PromptLengthLimit

    check_replaceable(args.prompt_cache_file, conversation=False)
    if args.decode is not None:
        return _decode(args)
    prompt = read_prompt(args)
    model, tokenizer = load_model(args, request.config)
    limit = position_limit(model)
    PromptLengthLimit(tokenizer, limit).check(len(prompt))
    if tokenizer.has_chat_template:
        messages = [{"role": "user", "content": prompt}]
        template = {"add_generation_prompt": False, "continue_final_message": True}
        text = tokenizer.apply_chat_template(messages, tokenize=False, **template)
        ids = tokenizer.encode(text, add_special_tokens=False)
    else:
        ids = tokenizer.encode(prompt)
    check_positions(len(ids), limit)
    caches, plan, _ = make_caches(model, request.config)
    if plan is not None:
        check_memory(plan, len(ids), free_memory())
        show_plan(plan, len(ids))
    with compressed(model), prefill_progress() as progress:
        options = {"prefill_step_size": args.prefill_step_size, "prompt_progress_callback": progress}
        for _ in generate_step(mx.array(ids), model, max_tokens=0, prompt_cache=caches, **options):
            pass
    for cache in compressed_caches(caches):
        cache.check_health()
    metadata = {"model": args.model or ""}
    save_prompt_cache(args.prompt_cache_file, caches, model=model, config=request.config, metadata=metadata)
    show_cache(cache_stats(caches, plan))
    return DONE


def _decode(args: argparse.Namespace) -> int:
    """Write the content of a compressed file as one of mlx-lm's own; return the exit code."""
    from mlx_lm.models.cache import make_prompt_cache  # loads mlx, which --help does without

    from mlx_tq.cli.loading import load_model  # likewise
    from mlx_tq.cli.screen import show_cache  # likewise
    from mlx_tq.config import PROFILES  # likewise
    from mlx_tq.prompt_cache.build import decode_caches  # likewise
    from mlx_tq.prompt_cache.cache_file import (  # likewise
        load_prompt_cache,
        read_header,  # likewise
        save_prompt_cache,
    )
    from mlx_tq.prompt_cache.statistics import cache_stats  # likewise

    args.model = args.model or read_header(args.decode).model_name or None
    model, _ = load_model(args)
    caches = decode_caches(make_prompt_cache(model), load_prompt_cache(args.decode, model=model).caches)
    metadata = {"model": args.model or ""}
    save_prompt_cache(args.prompt_cache_file, caches, model=model, config=PROFILES[OFF], metadata=metadata)
    show_cache(cache_stats(caches, None))
    return DONE


if __name__ == "__main__":
    sys.exit(main())
