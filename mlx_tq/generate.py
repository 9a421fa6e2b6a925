"""`mlx_tq.generate`: mlx_lm.generate on a compressed KV cache."""

import argparse
import json
import math
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.generate import setup_arg_parser, stream_generate
from mlx_lm.sample_utils import make_sampler

from mlx_tq.args import add_cache_arguments, parse_size
from mlx_tq.cache.factory import compressed_caches
from mlx_tq.dispatch import attention
from mlx_tq.errors import ConfigError, NonFiniteError
from mlx_tq.images import embed_images
from mlx_tq.limits import check_arguments, check_memory, check_positions, free_memory
from mlx_tq.models import load_with_config
from mlx_tq.probe import position_limit
from mlx_tq.prompt_cache import PromptCache, chosen_config, make_caches, open_prompt_cache, saved_model
from mlx_tq.prompts import encode, read_prompt, render, template_config
from mlx_tq.stats import GenerationStats, cache_stats, tokens_seen
from mlx_tq.ui import console, plan_dict, prefill_progress, show_plan, show_stats, warn

_NEARLY = 0.9  # of the model's positions
INTERRUPTED = 130  # exit code after Ctrl-C


class Answer(NamedTuple):
    """What was generated, and how."""

    text: str
    stats: GenerationStats


def build_parser() -> argparse.ArgumentParser:
    """Every flag of mlx_lm.generate, and ours."""
    parser: argparse.ArgumentParser = setup_arg_parser()
    parser.prog = "mlx_tq.generate"
    parser.usage = "%(prog)s [-p PROMPT] [options]"
    parser.description = "Generate text with an mlx-lm model on a compressed KV cache."
    parser.set_defaults(prompt=None)
    _action(parser, "model").help = "folder or hub name of the model (default: the small one in the package)"
    parser.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a file")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--kv-memory-limit", type=parse_size, metavar="SIZE", help="refuse a context whose cache exceeds this (4GB)"
    )
    add_cache_arguments(parser)
    return parser


def _action(parser: argparse.ArgumentParser, name: str) -> argparse.Action:
    return next(action for action in parser._actions if action.dest == name)  # argparse has no public way


def run(args: argparse.Namespace) -> int:
    """Generate; returns the exit code.

    Raises:
        MlxTqError: whatever stands in the way, before anything is generated where that can be known.
    """
    _check_request(args)
    prompt = read_prompt(args)
    if args.seed is not None:
        mx.random.seed(args.seed)
    name = args.model
    if name is None and args.prompt_cache_file is not None:
        name = saved_model(args.prompt_cache_file)
    model, tokenizer, model_config = load_with_config(
        name,
        adapter_path=args.adapter_path,
        tokenizer_config={"trust_remote_code": args.trust_remote_code},
        model_config={"quantize_activations": args.quantize_activations},
        trust_remote_code=args.trust_remote_code,
    )
    _add_eos_tokens(tokenizer, args.extra_eos_token)
    opened = open_prompt_cache(model, args)
    text = render(tokenizer, prompt, args, continues=args.prompt_cache_file is not None)
    embeddings = None
    if args.image:
        text, embeddings = embed_images(model, tokenizer, model_config, text, args.image)
    ids = encode(tokenizer, text, args)
    max_tokens = _check_limits(model, opened, len(ids), args)
    if args.verbose and opened.plan is not None:
        show_plan(opened.plan, tokens_seen(opened.caches) + len(ids) + max(max_tokens, 0))
    elif args.verbose:
        console.print(_describe_native(args), style="dim")

    options: dict[str, Any] = {"sampler": _sampler(tokenizer, args), "prefill_step_size": args.prefill_step_size}
    if embeddings is not None:
        options["input_embeddings"] = embeddings
    answer = _generate(model, tokenizer, ids, opened, max_tokens, args, options)
    if args.json:
        plan = plan_dict(opened.plan, answer.stats.cache.tokens) if opened.plan else None
        sys.stdout.write(json.dumps({"text": answer.text, "stats": answer.stats.to_dict(), "plan": plan}) + "\n")
    elif args.verbose:
        show_stats(answer.stats)
    return INTERRUPTED if answer.stats.finish_reason == "interrupted" else 0


def _describe_native(args: argparse.Namespace) -> str:
    if args.kv_bits is None:
        return "KV cache: mlx-lm's own"
    return f"KV cache: mlx-lm's own, at {args.kv_bits} bits from {args.quantized_kv_start:,} tokens on"


def _check_request(args: argparse.Namespace) -> None:
    """Raise, before a model is loaded for it, where a request cannot be met by any."""
    check_arguments(args)
    template_config(args)
    if chosen_config(args).is_off and args.kv_memory_limit is not None:
        raise ConfigError(
            "--kv-memory-limit is for compressed caches, and mlx-lm's own was chosen. Drop it, or take --max-kv-size."
        )


def _add_eos_tokens(tokenizer: Any, tokens: list[str]) -> None:
    for token in tokens:
        try:
            tokenizer.add_eos_token(token)
        except ValueError as error:
            raise ConfigError(f"--extra-eos-token: {error}. Give a token of its vocabulary, or its number.") from error


def _check_limits(model: Any, opened: PromptCache, prompt: int, args: argparse.Namespace) -> int:
    """Raise where the context cannot be; returns --max-tokens, cut to the positions that are left."""
    start, limit, max_tokens = tokens_seen(opened.caches) + prompt, position_limit(model), int(args.max_tokens)
    check_positions(start, limit)
    if limit is not None and (max_tokens < 0 or start + max_tokens > limit):
        if max_tokens >= 0:
            warn(f"the model allows {limit:,} positions: at most {limit - start:,} tokens will be generated.")
        max_tokens = limit - start
    if opened.plan is not None and opened.plan.eviction is not None:
        _warn_of_eviction(start + max(max_tokens, 0), limit)
    if opened.plan is not None:
        check_memory(opened.plan, start + max(max_tokens, 0), args.kv_memory_limit or free_memory())
    return max_tokens


def _warn_of_eviction(tokens: int, limit: int | None) -> None:
    warn("evicted tokens are gone: no rescue service is in use, so what they said cannot come back.")
    if limit is not None and tokens > _NEARLY * limit:
        warn(
            f"this conversation may reach {tokens:,} of the model's {limit:,} positions. Evicted tokens keep theirs: "
            "it ends there, whatever the cache holds."
        )


def _sampler(tokenizer: Any, args: argparse.Namespace) -> Any:
    return make_sampler(
        args.temp,
        args.top_p,
        args.min_p,
        args.min_tokens_to_keep,
        top_k=args.top_k,
        xtc_probability=args.xtc_probability,
        xtc_threshold=args.xtc_threshold,
        xtc_special_tokens=[*tokenizer.encode("\n"), *tokenizer.eos_token_ids],
    )


def _add_draft(model: Any, tokenizer: Any, caches: list[Any], args: argparse.Namespace) -> tuple[Any, list[Any]]:
    """The draft model, and the caches of both models."""
    draft, draft_tokenizer, _ = load_with_config(args.draft_model, trust_remote_code=args.trust_remote_code)
    if draft_tokenizer.vocab_size != tokenizer.vocab_size:
        raise ConfigError(
            f"the draft model has a vocabulary of {draft_tokenizer.vocab_size}, the model one of "
            f"{tokenizer.vocab_size}; take a draft model with the model's own tokenizer."
        )
    if len(caches) != len(model.layers):
        raise ConfigError("mlx-lm cannot draft for a model whose layers share caches. Drop --draft-model.")
    config = chosen_config(args)
    if config.evict is not None:  # the draft's own queries calibrate its cache
        config = replace(config, evict=replace(config.evict, stats=None))
    return draft, [*caches, *make_caches(draft, config, args.max_kv_size).caches]


def _generate(
    model: Any,
    tokenizer: Any,
    ids: list[int],
    opened: PromptCache,
    max_tokens: int,
    args: argparse.Namespace,
    options: dict[str, Any],
) -> Answer:
    caches, models = opened.caches, [model]
    if args.draft_model is not None:
        draft, caches = _add_draft(model, tokenizer, caches, args)
        options["draft_model"] = draft
        models.append(draft)
        options["num_draft_tokens"] = args.num_draft_tokens
    stream = not args.json
    text, ttft, finish = "", 0.0, "interrupted"
    last: Any = None
    started = time.perf_counter()
    try:
        with ExitStack() as stack:
            for each in models:
                stack.enter_context(attention(each))
            progress = stack.enter_context(prefill_progress(show=args.verbose))
            for response in stream_generate(
                model,
                tokenizer,
                ids,
                max_tokens=max_tokens,
                prompt_cache=caches,
                prompt_progress_callback=progress,
                kv_bits=args.kv_bits,
                kv_group_size=args.kv_group_size,
                quantized_kv_start=args.quantized_kv_start,
                **options,
            ):
                if last is None:
                    ttft = time.perf_counter() - started
                    progress(len(ids), len(ids))  # mlx-lm reports nothing of a prompt that a draft model reads too
                    _check_finite(response)
                last = response
                text += response.text
                if stream:
                    sys.stdout.write(response.text)
                    sys.stdout.flush()
            finish = last.finish_reason
            for cache in compressed_caches(caches):
                cache.check_health()
    except KeyboardInterrupt:
        pass
    except ValueError as error:  # mlx-lm's word for options that cannot be combined
        raise ConfigError(str(error)) from error
    if stream:
        sys.stdout.write("\n")
        sys.stdout.flush()
    return Answer(text, _stats(ids, opened, last, ttft, finish))


def _check_finite(response: Any) -> None:
    if math.isnan(response.logprobs[response.token].item()):
        raise NonFiniteError(
            "the model's logits are NaN after the prompt. Check its weights, or load it in bfloat16 or float32."
        )


def _stats(ids: list[int], opened: PromptCache, last: Any, ttft: float, finish: str) -> GenerationStats:
    return GenerationStats(
        prompt_tokens=len(ids),
        generation_tokens=last.generation_tokens if last else 0,
        ttft=ttft,
        prompt_tps=last.prompt_tps if last else 0.0,
        generation_tps=last.generation_tps if last else 0.0,
        finish_reason=finish,
        peak_memory=mx.get_peak_memory(),
        cache=cache_stats(opened.caches, opened.plan),
    )
