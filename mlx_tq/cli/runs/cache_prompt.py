"""The work of `mlx_tq.cache_prompt`."""

import argparse

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache as make_native_cache

from mlx_tq.cache.files import check_replaceable
from mlx_tq.cli.args import check_writable, config_from_args, names_cache
from mlx_tq.cli.loading import load_chosen
from mlx_tq.cli.preflight import check_arguments, check_memory, check_positions, free_memory
from mlx_tq.cli.progress import prefill_progress
from mlx_tq.cli.prompt_cache import make_caches, saved_model
from mlx_tq.cli.prompts import read_prompt
from mlx_tq.cli.screen import show_cache, show_plan
from mlx_tq.config import PROFILES
from mlx_tq.errors import ConfigError
from mlx_tq.integration.probe import position_limit
from mlx_tq.prompt_cache.build import decode_caches
from mlx_tq.prompt_cache.compressed import compressed
from mlx_tq.prompt_cache.files import load_prompt_cache, save_prompt_cache
from mlx_tq.prompt_cache.passes import compressed_caches
from mlx_tq.prompt_cache.statistics import cache_stats
from mlx_tq.session.text import PromptLengthLimit


def run(args: argparse.Namespace) -> int:
    """Read the prompt and save its cache; returns the exit code.

    Raises:
        MlxTqError: whatever stands in the way; no file is written then.
    """
    check_arguments(args)
    config = config_from_args(args)
    check_writable("--prompt-cache-file", args.prompt_cache_file)
    check_replaceable(args.prompt_cache_file, conversation=False)
    if args.decode is not None:
        return _decode(args)
    prompt = read_prompt(args)
    model, tokenizer = load_chosen(args)
    PromptLengthLimit(tokenizer, position_limit(model)).check(len(prompt))
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
    with compressed(model), prefill_progress() as progress:
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
    save_prompt_cache(args.prompt_cache_file, made.caches, model=model, config=config, metadata=metadata)
    show_cache(cache_stats(made.caches, made.plan))
    return 0


def _decode(args: argparse.Namespace) -> int:
    """Write a file of mlx-lm's own with what a compressed one holds; returns the exit code."""
    if args.prompt is not None or args.prompt_file is not None or names_cache(args):
        raise ConfigError("--decode takes all from its file: drop the prompt, and the flags of the cache.")
    args.model = args.model or saved_model(args.decode)
    model, _ = load_chosen(args)
    loaded = load_prompt_cache(args.decode, model=model)
    caches = decode_caches(make_native_cache(model), loaded.caches)
    save_prompt_cache(
        args.prompt_cache_file, caches, model=model, config=PROFILES["off"], metadata={"model": args.model or ""}
    )
    show_cache(cache_stats(caches, None))
    return 0
