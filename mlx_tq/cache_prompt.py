"""`mlx_tq.cache_prompt`: prefill a prompt once and save its cache, from which generate continues, also mlx-lm's."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from mlx_tq.cli.inputs import read_prompt, read_share
from mlx_tq.cli.options import OFF, Request, check_writable
from mlx_tq.cli.parser import CommandParser, add_cache_arguments, add_model_arguments, command_parser
from mlx_tq.cli.runner import DONE, command_main

if TYPE_CHECKING:
    from mlx_tq.prompt_cache.plan import Plan


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

    from mlx_tq.cli.screen import show_cache
    from mlx_tq.config import PROFILES
    from mlx_tq.prompt_cache.cache_file import check_replaceable, save_prompt_cache
    from mlx_tq.prompt_cache.statistics import cache_stats

    check_replaceable(args.prompt_cache_file, conversation=False)
    decodes = args.decode is not None
    model, caches, plan = _decode(args) if decodes else _prefill(request, prompt, share)
    config = PROFILES[OFF] if decodes else request.config
    save_prompt_cache(args.prompt_cache_file, caches, model=model, config=config)
    show_cache(cache_stats(caches, plan))
    return DONE


def _decode(args: argparse.Namespace) -> tuple[Any, list[Any], None]:
    """Return a model, the caches of a file in mlx-lm's own classes, and no plan."""
    from mlx_lm.models.cache import make_prompt_cache

    from mlx_tq.cli.loading import apply_cache_source, load_model
    from mlx_tq.prompt_cache.build import decode_caches
    from mlx_tq.prompt_cache.cache_file import load_prompt_cache

    apply_cache_source(args, args.decode)
    model, _ = load_model(args)
    return model, decode_caches(make_prompt_cache(model), load_prompt_cache(args.decode, model=model).caches), None


def _prefill(request: Request, prompt: str, share: float | None) -> tuple[Any, list[Any], "Plan | None"]:
    """Return a model, the caches of the prompt, and their plan; with a share, the caches are compacted."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    from mlx_tq.cli.loading import check_memory, check_positions, load_model, make_caches
    from mlx_tq.cli.prompts import encode_document
    from mlx_tq.cli.screen import prefill_progress, show_plan
    from mlx_tq.integration.probe import check_token_ids, position_limit
    from mlx_tq.prompt_cache.compressed import compressed_attention
    from mlx_tq.prompt_cache.layer_group import compressed_caches
    from mlx_tq.prompt_cache.row_weights import repetition
    from mlx_tq.session.compaction import compact_prompt_cache

    step = request.args.prefill_step_size
    model, tokenizer = load_model(request.args, request.config)
    limit = position_limit(model)
    ids = encode_document(tokenizer, prompt, limit)
    check_token_ids(model, ids)
    check_positions(len(ids), limit)
    caches, plan, _ = make_caches(model, request.config)
    repeated = [] if share is None else repetition(model, tokenizer, ids)
    if plan is not None:
        check_memory(plan, len(ids) + len(repeated), None, step)
        show_plan(plan, len(ids))
    with compressed_attention(model), prefill_progress() as progress:
        options = {"prefill_step_size": step, "prompt_progress_callback": progress}
        for _ in generate_step(mx.array(ids), model, max_tokens=0, prompt_cache=caches, **options):
            pass
    for cache in compressed_caches(caches):
        cache.check_health()
    if share is not None:
        with prefill_progress(title="Compacting") as progress:
            caches = compact_prompt_cache(model, tokenizer, caches, ids, share, progress=progress)
    return model, caches, plan


main = command_main(build_parser, run)

if __name__ == "__main__":
    sys.exit(main())
