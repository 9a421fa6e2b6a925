"""The work of `mlx_tq.generate`."""

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import make_sampler

from mlx_tq.cli.args import (
    RESCUE_OPTIONS,
    SHADOW,
    beside_recall,
    field_of,
    how_to_recall,
    option_value,
    recall_value,
    refuse_idle_rescue,
    rescue_from_args,
)
from mlx_tq.cli.asking import ask_beforehand
from mlx_tq.cli.frame import DONE, INTERRUPTED
from mlx_tq.cli.images import embed_images
from mlx_tq.cli.joining import collect_stats, join_ranks, show_ranks
from mlx_tq.cli.preflight import check_arguments, check_memory, check_positions, free_memory
from mlx_tq.cli.prompt_cache import PromptCache, chosen_config, open_prompt_cache, saved_model
from mlx_tq.cli.prompts import encode, read_prompt, render, template_config
from mlx_tq.cli.runs.answering import answer_prompt
from mlx_tq.cli.screen import (
    console,
    plan_dict,
    show_plan,
    show_quoted,
    show_recalled,
    show_shadow,
    show_stats,
    warn,
)
from mlx_tq.cli.stores import chosen_store
from mlx_tq.config import RescueConfig
from mlx_tq.distributed.group import Ranks
from mlx_tq.errors import ConfigError
from mlx_tq.integration.probe import position_limit
from mlx_tq.models import load_with_config
from mlx_tq.prefix_cache.folder import Folder
from mlx_tq.prefix_cache.prefix_cache import PrefixCache
from mlx_tq.prompt_cache.plan import Plan
from mlx_tq.prompt_cache.statistics import tokens_seen
from mlx_tq.rescue import OFF, open_service
from mlx_tq.session.restore import take_archive_warning
from mlx_tq.session.shadow_mode import make_shadow
from mlx_tq.session.text import PromptLengthLimit

_NEARLY = 0.9  # of the model's positions
_ALONE = ("--draft-model", "--image", "--prompt-cache-file")


def run(args: argparse.Namespace) -> int:
    """Generate; returns the exit code.

    Raises:
        MlxTqError: whatever stands in the way, before anything is generated where that can be known.
    """
    _check_request(args)
    ranks = join_ranks(args)
    folder = _store_folder(args, ranks)
    schema = None if args.json_schema is None else ranks.broadcast(lambda: _read_schema(args))
    prompt = ranks.broadcast(lambda: read_prompt(args))
    if args.seed is not None:
        mx.random.seed(args.seed)
    name = args.model
    if name is None and args.prompt_cache_file is not None:
        name = saved_model(args.prompt_cache_file)
    model, tokenizer, model_config = load_with_config(
        name,
        dtype=args.dtype,
        dequantize=args.dequantize,
        ranks=ranks,
        adapter_path=args.adapter_path,
        tokenizer_config={"trust_remote_code": args.trust_remote_code},
        model_config={"quantize_activations": args.quantize_activations},
        trust_remote_code=args.trust_remote_code,
    )
    _add_eos_tokens(tokenizer, args.extra_eos_token)
    text = render(tokenizer, prompt, args, continues=args.prompt_cache_file is not None)
    PromptLengthLimit(tokenizer, position_limit(model)).check(len(text))
    embeddings = None
    if args.image:
        text, embeddings = embed_images(model, tokenizer, model_config, text, args.image)
    ids = encode(tokenizer, text, args)
    check_positions(len(ids), position_limit(model))
    ask_beforehand(model, tokenizer, chosen_config(args))
    opened = open_prompt_cache(model, args)
    max_tokens = _check_limits(model, opened, len(ids), args)
    if args.verbose and opened.plan is not None:
        beside = beside_recall(args) if recall_value(args) != OFF else None
        show_plan(opened.plan, tokens_seen(opened.caches) + len(ids) + max(max_tokens, 0), beside)
    elif args.verbose:
        console.print(_describe_native(args), style="dim")

    options: dict[str, Any] = {"sampler": _sampler(tokenizer, args, ranks)}
    if schema is not None:
        options["logits_processors"] = [_held_to(schema, tokenizer, ids, args)]
    if embeddings is not None:
        options["input_embeddings"] = embeddings
    store = None if folder is None or opened.plan is None else PrefixCache(model, opened.plan, folder, warn)
    shadow = make_shadow(model, opened.plan, option_value(args, SHADOW), has_prefix_cache=store is not None)
    if shadow is not None:
        opened = opened._replace(caches=shadow.caches)
    rescue, plan = chosen_rescue(args), opened.plan
    turn_options: dict[str, Any] = {"rescue": rescue, "prefix_cache": store, "shadow": shadow}
    answer = answer_prompt(model, tokenizer, opened, prompt, ids, max_tokens, args, options, **turn_options)
    turn = answer.turn
    ranks.synchronize()
    together = collect_stats(ranks, answer.cache, take_archive_warning(opened.caches))
    if args.json:
        report = answer.to_dict() | {"plan": plan_dict(plan, answer.cache.tokens) if plan else None}
        if shadow is not None:
            report["shadow"] = shadow.report().to_dict()
        if not ranks.is_alone:
            report["ranks"] = together
        sys.stdout.write(json.dumps(report) + "\n")
    elif args.verbose:
        if answer.can_recall:
            show_recalled(turn.recalled, turn.by_search, turn.archived, turn.recall_seconds)
        show_quoted(turn.quotation, turn.rescue_seconds)
        show_stats(turn, answer.cache)
        if shadow is not None:
            show_shadow(shadow.report())
        if not ranks.is_alone:
            show_ranks(together)
    return INTERRUPTED if answer.turn.finish_reason == "interrupted" else DONE


def _describe_native(args: argparse.Namespace) -> str:
    if args.kv_bits is None:
        return "KV cache: mlx-lm's own"
    return f"KV cache: mlx-lm's own, at {args.kv_bits} bits from {args.quantized_kv_start:,} tokens on"


def _check_request(args: argparse.Namespace) -> None:
    """Raise, before a model is loaded for it, where a request cannot be met by any."""
    check_arguments(args)
    template_config(args)
    config = chosen_config(args)
    rescue = chosen_rescue(args)
    if rescue.service != OFF:
        open_service(rescue.service)  # refuses what is no address
    if option_value(args, SHADOW) is not None:
        for flag, given in (("--draft-model", args.draft_model), ("--prompt-cache-file", args.prompt_cache_file)):
            if given:
                raise ConfigError(f"--kv-shadow cannot be combined with {flag}. Drop one of the two.")
    if config.is_off and args.kv_memory_limit is not None:
        raise ConfigError(
            "--kv-memory-limit is for compressed caches, and mlx-lm's own was chosen. Drop it, or take --max-kv-size."
        )


def chosen_rescue(args: argparse.Namespace) -> RescueConfig:
    """How text comes back: in no way if just the environment says so, and it cannot here.

    Raises:
        ConfigError: a flag says so.
    """
    rescue = rescue_from_args(args, OFF)
    refuse_idle_rescue(args, rescue)
    others = [*_given(args), *([SHADOW.flag] if option_value(args, SHADOW) is not None else [])]
    if rescue.service == OFF or not (others or chosen_config(args).evict is None):
        return rescue
    if option_value(args, RESCUE_OPTIONS[0], {}) in (None, OFF):
        return RescueConfig()
    if others:
        raise ConfigError(f"--rescue cannot be combined with {others[0]}. Drop one of the two.")
    raise ConfigError("--rescue is given, but no token leaves: add --kv-evict triattention, or drop it.")


def _given(args: argparse.Namespace) -> list[str]:
    """Flags with which neither a store nor rescue knows all tokens as text."""
    return [flag for flag in _ALONE if getattr(args, field_of(flag))]


def _store_folder(args: argparse.Namespace, ranks: Ranks) -> Folder | None:
    """Where prompts are stored: nowhere if just the environment says so, and something is asked for that cannot be."""
    others = _given(args)
    if chosen_config(args).is_off:
        others.append("mlx-lm's own caches")
    return chosen_store(args, others, ranks)


def _read_schema(args: argparse.Namespace) -> dict[str, Any]:
    if args.draft_model is not None:
        raise ConfigError("--json-schema cannot be combined with --draft-model. Drop one of the two.")
    try:
        schema = json.loads(Path(args.json_schema).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--json-schema {args.json_schema} cannot be read: {error}. Give a JSON file.") from error
    if not isinstance(schema, dict):
        raise ConfigError(f"--json-schema {args.json_schema} holds {schema!r:.80}; it must be a JSON object.")
    return schema


def _held_to(schema: dict[str, Any], tokenizer: Any, ids: list[int], args: argparse.Namespace) -> Any:
    """What keeps an answer to a schema, behind the thoughts that the prompt may have opened."""
    try:
        from mlx_tq.grammar.constraint import Grammars  # llguidance is an extra, which may not be installed
        from mlx_tq.grammar.grammar_source import GrammarError, GrammarSource  # imports llguidance, too
    except ImportError as error:
        raise ConfigError(f"--json-schema needs {error.name}: pip install 'mlx-tq[json]'.") from error
    thinks = tokenizer.has_thinking and tokenizer.rfind_think_start(ids) > tokenizer.rfind_think_end(ids)
    grammars = Grammars(tokenizer)
    try:
        grammar = asyncio.run(grammars.compile(GrammarSource.of_schema(schema)))
        return grammars.constraint(grammar, thinks=thinks)
    except GrammarError as error:
        path = ".".join(error.path) or "the schema"
        raise ConfigError(f"--json-schema {args.json_schema}: {path}: {error}.") from error
    finally:
        grammars.close()


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
        _warn_of_eviction(start + max(max_tokens, 0), limit, opened.plan, args)
    if opened.plan is not None:
        check_memory(opened.plan, start + max(max_tokens, 0), args.kv_memory_limit or free_memory())
    return max_tokens


def _warn_of_eviction(tokens: int, limit: int | None, plan: Plan, args: argparse.Namespace) -> None:
    gone = not plan.recalls and chosen_rescue(args).service == OFF and option_value(args, SHADOW) is None
    if gone:
        remedy = "" if beside_recall(args) else f"; {how_to_recall(args)} brings it back"
        warn(f"evicted tokens are gone, and the answer may miss what they said{remedy}.")
    if limit is not None and tokens > _NEARLY * limit:
        warn(
            f"this conversation may reach {tokens:,} of the model's {limit:,} positions. Evicted tokens keep theirs: "
            "it ends there, whatever the cache holds."
        )


def _sampler(tokenizer: Any, args: argparse.Namespace, ranks: Ranks) -> Any:
    sampler = make_sampler(
        args.temp,
        args.top_p,
        args.min_p,
        args.min_tokens_to_keep,
        top_k=args.top_k,
        xtc_probability=args.xtc_probability,
        xtc_threshold=args.xtc_threshold,
        xtc_special_tokens=[*tokenizer.encode("\n"), *tokenizer.eos_token_ids],
    )
    return ranks.share_sampler(sampler)
