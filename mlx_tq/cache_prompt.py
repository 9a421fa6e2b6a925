"""`mlx_tq.cache_prompt`: read a prompt once, save its compressed cache, and generate from it later."""

import argparse

import mlx.core as mx
from mlx_lm.generate import DEFAULT_PREFILL_STEP_SIZE, generate_step

from mlx_tq.args import add_cache_arguments, check_writable, config_from_args
from mlx_tq.cache.factory import compressed_caches
from mlx_tq.cache.persist import save_prompt_cache
from mlx_tq.dispatch import attention
from mlx_tq.limits import check_arguments, check_memory, check_positions, free_memory
from mlx_tq.models import fingerprint, load
from mlx_tq.probe import position_limit
from mlx_tq.prompt_cache import make_caches
from mlx_tq.prompts import read_prompt
from mlx_tq.stats import cache_stats
from mlx_tq.ui import prefill_progress, show_cache, show_plan


def build_parser() -> argparse.ArgumentParser:
    """The flags of mlx_lm.cache_prompt that apply, and ours."""
    parser = argparse.ArgumentParser(
        prog="mlx_tq.cache_prompt",
        usage="%(prog)s --prompt-cache-file FILE [-p PROMPT] [options]",
        description="Read a prompt once and save its compressed KV cache.",
    )
    parser.add_argument("--model", help="folder or hub name (default: the embedded model)")
    parser.add_argument("--adapter-path", help="folder of trained adapter weights")
    parser.add_argument("--trust-remote-code", action="store_true", help="let the tokenizer run its own code")
    parser.add_argument("--prompt", "-p", help="the prompt; - reads standard input")
    parser.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a file")
    parser.add_argument("--prompt-cache-file", required=True, metavar="FILE", help="the .safetensors file to write")
    parser.add_argument(
        "--prefill-step-size", type=int, default=DEFAULT_PREFILL_STEP_SIZE, help="tokens read at a time"
    )
    add_cache_arguments(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Read the prompt and save its cache; returns the exit code.

    Raises:
        MlxTqError: whatever stands in the way; no file is written then.
    """
    check_arguments(args)
    config = config_from_args(args)
    check_writable("--prompt-cache-file", args.prompt_cache_file)
    prompt = read_prompt(args)
    model, tokenizer = load(
        args.model,
        adapter_path=args.adapter_path,
        tokenizer_config={"trust_remote_code": args.trust_remote_code},
        trust_remote_code=args.trust_remote_code,
    )
    if tokenizer.has_chat_template:
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=False, continue_final_message=True
        )
        ids = tokenizer.encode(text, add_special_tokens=False)
    else:
        ids = tokenizer.encode(prompt)
    check_positions(len(ids), position_limit(model))
    made = make_caches(model, config)
    if made.plan is not None:
        check_memory(made.plan, len(ids), free_memory())
        show_plan(made.plan, len(ids))
    with attention(model), prefill_progress(show=True) as progress:
        for _ in generate_step(
            mx.array(ids),
            model,
            max_tokens=0,
            prompt_cache=made.caches,
            prefill_step_size=args.prefill_step_size,
            prompt_progress_callback=progress,
        ):
            pass
    for cache in compressed_caches(made.caches):
        cache.check_health()
    metadata = {"model": args.model or ""}
    save_prompt_cache(args.prompt_cache_file, made.caches, model=fingerprint(model), config=config, metadata=metadata)
    show_cache(cache_stats(made.caches, made.plan))
    return 0
