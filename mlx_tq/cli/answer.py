"""Run `mlx_tq.generate`: answer one prompt on the caches that its flags describe."""

import argparse
import asyncio
import json
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import make_sampler

from mlx_tq.cli.inputs import read_prompt, read_schema
from mlx_tq.cli.loading import (
    PromptCache,
    apply_cache_source,
    calibrate_model,
    check_memory,
    check_positions,
    join_ranks,
    limit_buffer_cache,
    load_draft_model,
    load_options,
    make_caches,
    note_weights,
    open_caches,
    open_prefix_folder,
    state_storage,
    waits_for_calibration,
    weights_dict,
)
from mlx_tq.cli.options import Request
from mlx_tq.cli.prompts import embed_images, encode, render
from mlx_tq.cli.runner import DONE, INTERRUPTED
from mlx_tq.cli.sampling_settings import make_processors
from mlx_tq.cli.screen import (
    collect_stats,
    note,
    plan_dict,
    prefill_progress,
    show_lookup,
    show_plan,
    show_ranks,
    show_restored,
    show_shadow,
    show_stats,
    warn,
)
from mlx_tq.cli.terminal_text import write_answer
from mlx_tq.config import RescueConfig
from mlx_tq.distributed.group import Ranks
from mlx_tq.errors import ConfigError
from mlx_tq.integration.probe import check_token_ids, position_limit
from mlx_tq.models import load, ranks_of
from mlx_tq.policies import CalibratedPolicy
from mlx_tq.policies.policy import AUTO as AUTO_CALIBRATION
from mlx_tq.prefix_cache.prefix_cache import PrefixCache
from mlx_tq.prompt_cache.compressed import compressed_attention
from mlx_tq.prompt_cache.run_summary import RunSummary
from mlx_tq.prompt_cache.statistics import CacheStats, cache_stats, tokens_seen
from mlx_tq.prompt_cache.warm_up import compile_kernels
from mlx_tq.rescue import AUTO, OFF, START_S, open_client
from mlx_tq.session.restore import take_archive_warning
from mlx_tq.session.shadow_mode import Shadow, make_shadow
from mlx_tq.session.text import PlainText, PromptLengthLimit, is_reasoning_open
from mlx_tq.session.transcript import Transcript, quotation_limit
from mlx_tq.session.turn import UNLIMITED, Turn, TurnStats
from mlx_tq.speculative.lookup_mode import LookupMode

_NEARLY_FULL = 0.9  # of the model's context


Inputs = tuple[str, dict[str, Any] | None]  # the prompt, and the JSON schema of the answer
Answer = tuple[str, TurnStats, CacheStats]  # the generated text, and the statistics of turn and cache


def answer_request(request: Request, inputs: Inputs | None) -> int:
    """Load the model, answer the prompt and show what it took; return the exit code.

    Without `inputs`, the first rank reads them.
    """
    args = request.args
    ranks = join_ranks(request)
    folder, states = open_prefix_folder(request, ranks), state_storage(request)
    prompt, schema = inputs or ranks.broadcast(lambda: (read_prompt(args), read_schema(args)))
    if args.seed is not None:
        mx.random.seed(args.seed)
    model, tokenizer, model_config = _load(request, ranks)
    text = render(tokenizer, prompt, args, continues=args.prompt_cache_file is not None)
    limit = position_limit(model)
    PromptLengthLimit(tokenizer, limit).check(len(text))
    options = {name: getattr(args, name) for name in ("kv_bits", "kv_group_size", "quantized_kv_start")}
    if args.image:
        ids, options["input_embeddings"] = embed_images(model, tokenizer, model_config, text, args)
    else:
        ids = encode(tokenizer, text, args)
        check_token_ids(model, ids)
    check_positions(len(ids), limit)
    waits = waits_for_calibration(args)
    calibrate_model(model, tokenizer, request.config, name=args.model, waits=waits)
    opened = open_caches(model, request)
    if args.max_kv_size is not None and not request.changes_cache:
        warn(
            f"--max-kv-size {args.max_kv_size} chooses mlx-lm's rotating cache, which is not compressed. For a "
            "compressed cache of limited size, use --kv-evict and --kv-budget instead."
        )
    plan, lookup_mode = opened.plan, LookupMode(args.prompt_lookup if args.draft_model is None else OFF)
    lookup_mode.check(model, opened.caches)
    lengths = lookup_mode.compiled_lengths if args.draft_model is None else _verify_lengths(args)
    compile_kernels(model, plan, lengths=lengths)
    options["max_tokens"] = _limit_tokens(opened, len(ids), limit, request)
    if args.verbose and plan is not None:
        show_plan(plan, tokens_seen(opened.caches) + len(ids) + max(options["max_tokens"], 0), request.recall_blocker)
    elif args.verbose:
        bits = f", at {args.kv_bits} bits from {args.quantized_kv_start:,} tokens on" if args.kv_bits else ""
        note(f"KV cache: mlx-lm's own{bits}")
    if args.verbose:
        show_lookup(lookup_mode.blocker(model, opened.caches))
    options["sampler"] = ranks.share_sampler(_make_sampler(args, tokenizer))
    constraints = [] if schema is None else [_make_constraint(schema, tokenizer, ids, args.json_schema)]
    options["logits_processors"] = [*make_processors(vars(args)), *constraints]
    prefix_cache = None if folder is None or plan is None else PrefixCache(model, plan, folder, warn, states=states)
    shadow = make_shadow(model, plan, request.shadow, has_prefix_cache=prefix_cache is not None)
    if shadow is not None:
        opened = opened._replace(caches=shadow.caches)
    can_recall = plan is not None and plan.recalls and request.values["--kv-recall"] != OFF
    query = prompt if can_recall or request.rescue.service != OFF else None
    answer = _answer(
        *(model, tokenizer, opened, ids, query, request, options, constraints, prefix_cache, shadow, lookup_mode)
    )
    _report(model, answer, opened, request, can_recall, shadow)
    return INTERRUPTED if answer[1].finish_reason == "interrupted" else DONE


def _make_sampler(args: argparse.Namespace, tokenizer: Any) -> Any:
    return make_sampler(
        *(args.temp, args.top_p, args.min_p, args.min_tokens_to_keep, args.top_k),
        xtc_probability=args.xtc_probability,
        xtc_threshold=args.xtc_threshold,
        xtc_special_tokens=[*tokenizer.encode("\n"), *tokenizer.eos_token_ids],
    )


def _verify_lengths(args: argparse.Namespace) -> range:
    """Return the tokens of a pass with a draft model: one, and up to as many as are drafted."""
    return range(1, 2 + args.num_draft_tokens)


def _load(request: Request, ranks: Ranks) -> tuple[Any, Any, dict[str, Any]]:
    """Return the model, by default that of the cache file, its tokenizer and its configuration."""
    args = request.args
    if args.prompt_cache_file is not None:
        apply_cache_source(args, args.prompt_cache_file)
    limit_buffer_cache()
    model_config = {"quantize_activations": args.quantize_activations}
    options = load_options(args, request.config)
    model, tokenizer, config = load(args.model, ranks=ranks, model_config=model_config, return_config=True, **options)
    if args.verbose:
        note_weights(model, args)
    for token in args.extra_eos_token:
        try:
            tokenizer.add_eos_token(token)
        except ValueError as error:
            raise ConfigError(f"--extra-eos-token: {error}. Give a token of its vocabulary, or its number.") from error
    return model, tokenizer, config


def _limit_tokens(opened: PromptCache, prompt: int, limit: int | None, request: Request) -> int:
    """Return --max-tokens, cut to the model's context; raise ConfigError if context or memory are too small."""
    args, plan = request.args, opened.plan
    start, max_tokens = tokens_seen(opened.caches) + prompt, int(args.max_tokens)
    check_positions(start, limit)
    if limit is not None and (max_tokens < 0 or start + max_tokens > limit):
        if max_tokens >= 0:
            warn(f"the model's context is {limit:,} tokens: at most {limit - start:,} tokens will be generated.")
        max_tokens = limit - start
    if plan is None:
        return max_tokens
    tokens = start + max(max_tokens, 0)
    if plan.eviction is not None:
        if not plan.recalls and request.rescue.service == OFF and request.shadow is None:
            flag = "--kv-archive on" if request.values["--kv-archive"] is False else "--kv-recall auto"
            remedy = "" if request.recall_blocker else f" Add {flag}."
            warn(f"evicted tokens are dropped, so the answer cannot use them.{remedy}")
        if limit is not None and tokens > _NEARLY_FULL * limit:
            warn(f"this run may reach {tokens:,} of {limit:,} positions. Eviction does not extend the context.")
    check_memory(plan, tokens, args.kv_memory_limit, args.prefill_step_size)
    return max_tokens


def _make_constraint(schema: dict[str, Any], tokenizer: Any, ids: list[int], path: str) -> Any:
    """Return the logits processor that holds the answer to a schema, after the thoughts that the prompt may open."""
    try:
        from mlx_tq.grammar.constraint import Grammars  # llguidance is an extra, which may not be installed
        from mlx_tq.grammar.grammar_source import GrammarError, GrammarSource  # imports llguidance, too
    except ImportError as error:
        raise ConfigError(f"--json-schema needs {error.name}: pip install 'mlx-tq[json]'.") from error
    grammars = Grammars(tokenizer)
    try:
        grammar = asyncio.run(grammars.compile(GrammarSource.of_schema(schema)))
        return grammars.constraint(grammar, thinks=is_reasoning_open(tokenizer, ids))
    except GrammarError as error:
        part = ".".join(error.path) or "the schema"
        raise ConfigError(f"--json-schema {path}: {part}: {error}.") from error
    finally:
        grammars.close()


def _answer(
    model: Any,
    tokenizer: Any,
    opened: PromptCache,
    ids: list[int],
    query: str | None,
    request: Request,
    options: dict[str, Any],
    constraints: list[Any],
    prefix_cache: PrefixCache | None,
    shadow: Shadow | None,
    lookup_mode: LookupMode,
) -> Answer:
    """Print the answer to a prompt of tokens `ids`, whose evicted text is searched for `query`; Ctrl-C ends it early.

    `options` are more arguments of mlx-lm's `stream_generate`.
    """
    args, caches, limit = request.args, opened.caches, position_limit(model)
    text = ""
    with ExitStack() as stack:
        transcript = stack.enter_context(_open_transcript(model, tokenizer, request.rescue))
        transcript.append_unknown(tokens_seen(caches))
        if args.draft_model is not None:
            draft, draft_caches = _load_draft(tokenizer, request)
            stack.enter_context(compressed_attention(draft))
            options |= {"draft_model": draft, "num_draft_tokens": args.num_draft_tokens}
            options |= {"prompt_cache": [*caches, *draft_caches]}
        show = stack.enter_context(prefill_progress(show=args.verbose))
        turn = stack.enter_context(
            Turn(
                *(model, tokenizer, caches, transcript, args.prefill_step_size),
                prefix_cache=prefix_cache,
                shadow=shadow,
                lookup_mode=lookup_mode,
                progress=show,
            )
        )
        try:
            room = UNLIMITED if limit is None else limit - len(transcript.ids) - len(ids)
            turn.prepare(ids, query, split=query is not None, room=room)
            for response in turn.decode(**options):
                text += response.text
                if not args.json:
                    write_answer(response.text)
            for constraint in constraints:
                constraint.check()
        except KeyboardInterrupt:
            pass
        except ValueError as error:  # mlx-lm's, for options that cannot be combined
            raise ConfigError(str(error)) from error
        answer = text, turn.stats, cache_stats(caches, opened.plan)
    if not args.json:
        write_answer("\n")
    if query is not None and ranks_of(model).is_alone and (warning := take_archive_warning(caches)):
        warn(warning)
    return answer


@contextmanager
def _open_transcript(model: Any, tokenizer: Any, rescue: RescueConfig) -> Iterator[Transcript]:
    """Open the transcript of one answer; the rescue service deletes its text afterwards."""
    ranks = ranks_of(model)
    client = open_client(rescue.service) if ranks.is_first else None  # which searches for all
    limit = quotation_limit(rescue, position_limit(model))
    start_s = START_S if rescue.service == AUTO else 0.0
    transcript = Transcript(PlainText(tokenizer), client, rescue, uuid.uuid4().hex, limit, start_s)
    try:
        yield transcript
    finally:
        if client is not None:
            if transcript.has_sent:
                client.forget(transcript.session_id)
            client.close()
    if client is not None and (warning := client.take_warning()) and ranks.is_alone:
        warn(warning)


def _load_draft(tokenizer: Any, request: Request) -> tuple[Any, list[Any]]:
    args, config = request.args, request.config
    draft, draft_tokenizer = load_draft_model(args, config, tokenizer)
    if config.evict is not None and isinstance(config.evict.policy, CalibratedPolicy) and config.evict.policy.file:
        policy = replace(config.evict.policy, calibration=AUTO_CALIBRATION)  # the file is of the other model
        config = replace(config, evict=replace(config.evict, policy=policy))
    calibrate_model(draft, draft_tokenizer, config, name=args.draft_model, waits=waits_for_calibration(args))
    caches, plan, _ = make_caches(draft, config, args.max_kv_size)
    compile_kernels(draft, plan, lengths=_verify_lengths(args))
    return draft, caches


def _report(
    model: Any, answer: Answer, opened: PromptCache, request: Request, can_recall: bool, shadow: Shadow | None
) -> None:
    """Show the statistics of an answer, or print it as JSON."""
    args, ranks, (text, turn, cache) = request.args, ranks_of(model), answer
    ranks.synchronize()
    rank_stats = collect_stats(ranks, cache, take_archive_warning(opened.caches))
    if args.json:
        stats = asdict(turn)
        recalled = {"positions": stats.pop("recalled"), "by_search": stats.pop("by_search")}
        recalled |= {"archived": turn.archived, "partial": stats.pop("recall_is_partial")}
        recalled |= {"seconds": turn.recall_seconds}
        quotation = stats.pop("quotation")
        quoted = {"ranges": quotation["ranges"], "tokens": len(quotation["ids"]), "seconds": turn.rescue_seconds}
        report: dict[str, Any] = {
            "text": text,
            "stats": {**stats, "cache": cache.to_dict()},
            "recalled": recalled if can_recall else None,
            "rescued": quoted if request.rescue.service != OFF else None,
            "plan": plan_dict(opened.plan, cache.tokens) if opened.plan else None,
            "weights": weights_dict(model),
            "ran": RunSummary.of(opened.plan, cache.tokens).to_dict() if opened.plan else None,
        }
        if shadow is not None:
            report["shadow"] = shadow.report().to_dict()
        if not ranks.is_alone:
            report["ranks"] = rank_stats
        sys.stdout.write(json.dumps(report) + "\n")
    elif args.verbose:
        show_restored(turn, can_recall=can_recall)
        show_stats(turn, cache)
        if opened.plan is not None:
            note(str(RunSummary.of(opened.plan, cache.tokens)))
        if shadow is not None:
            show_shadow(shadow.report(), shadow.native_dtype)
        if not ranks.is_alone:
            show_ranks(rank_stats)
