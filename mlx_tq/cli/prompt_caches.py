"""Make the caches that `mlx_tq.cache_prompt` saves: of a prompt, or those of a file in mlx-lm's own classes."""

import argparse
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from mlx_tq.cli.loading import apply_cache_source, check_memory, check_positions, load_model, make_caches
from mlx_tq.cli.options import Request
from mlx_tq.cli.prompts import encode_document
from mlx_tq.cli.screen import prefill_progress, show_plan
from mlx_tq.integration.probe import check_token_ids, position_limit
from mlx_tq.prompt_cache.build import decode_caches
from mlx_tq.prompt_cache.cache_file import load_prompt_cache
from mlx_tq.prompt_cache.compressed import compressed_attention
from mlx_tq.prompt_cache.layer_group import compressed_caches
from mlx_tq.prompt_cache.plan import Plan
from mlx_tq.prompt_cache.row_weights import repetition
from mlx_tq.session.compaction import compact_prompt_cache


def decode_file(args: argparse.Namespace) -> tuple[Any, list[Any], None]:
    """Return the model of a file, its caches in mlx-lm's own classes, and no plan."""
    apply_cache_source(args, args.decode)
    model, _ = load_model(args)
    return model, decode_caches(make_prompt_cache(model), load_prompt_cache(args.decode, model=model).caches), None


def prefill_prompt(request: Request, prompt: str, share: float | None) -> tuple[Any, list[Any], Plan | None]:
    """Return the model, the caches of the prompt, and their plan; with a share, the caches are compacted."""
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
