"""`mlx_tq.generate`: mlx_lm.generate on a compressed KV cache."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_tq.cli.options import OFF, Request, parse_size
from mlx_tq.cli.parser import (
    CommandParser,
    add_cache_arguments,
    add_model_arguments,
    add_sampling_arguments,
    command_parser,
)
from mlx_tq.cli.runner import DONE, INTERRUPTED, run_command
from mlx_tq.errors import ConfigError

if TYPE_CHECKING:
    from mlx_tq.cli.loading import PromptCache
    from mlx_tq.distributed.group import Ranks

_NEARLY_FULL = 0.9  # of the model's context


def build_parser() -> CommandParser:
    """Return the parser: every flag of mlx_lm.generate with its default, and ours."""
    parser = command_parser(
        "generate", "Generate text with an mlx-lm model on a compressed KV cache.", "[-p PROMPT] [options]"
    )
    add_cache_arguments(parser, recall=True, prefix_cache=True, shadow=True, rescue=True)
    add_model_arguments(parser.add_argument_group("model"))
    add = parser.add_argument_group("prompt").add_argument
    add("--prompt", "-p", help="prompt; - reads standard input (default: standard input)")
    add("--prompt-file", metavar="FILE", help="read the prompt from a file (default: none)")
    add("--image", nargs="+", default=(), metavar="FILE", help="images for a vision model (default: none)")
    add("--system-prompt", metavar="TEXT", help="system prompt (default: none)")
    add("--prefill-response", metavar="TEXT", help="start of the response (default: none)")
    add("--chat-template-config", metavar="JSON", help="options of the chat template (default: {})")
    add("--ignore-chat-template", action="store_true", help="use the prompt without the chat template")
    add("--use-default-chat-template", action="store_true", help="use the tokenizer's default chat template")
    add("--prompt-cache-file", metavar="FILE", help="continue from a file of mlx_tq.cache_prompt (default: none)")
    _add_generation_arguments(parser)
    add = parser.add_argument_group("speed and memory").add_argument
    add("--prefill-step-size", type=int, default=2048, metavar="N", help="tokens per prefill step")
    add("--draft-model", metavar="MODEL", help="model for speculative decoding (default: none)")
    add("--num-draft-tokens", type=int, default=3, metavar="N", help="tokens drafted per step")
    add("--quantize-activations", "-qa", action="store_true", help="quantize activations to the mode of the weights")
    add("--max-kv-size", type=int, metavar="N", help="size of mlx-lm's rotating cache, instead of ours (default: none)")
    add("--kv-bits", type=int, metavar="N", help="bits of mlx-lm's quantized cache, instead of ours (default: none)")
    add("--kv-group-size", type=int, default=64, metavar="N", help="group size for --kv-bits")
    add("--quantized-kv-start", type=int, default=5000, metavar="N", help="step at which --kv-bits begins")
    limit = "refuse a context whose KV cache needs more than this, such as 4GB (default: the free memory)"
    add("--kv-memory-limit", type=parse_size, metavar="SIZE", help=limit)
    return parser


def _add_generation_arguments(parser: CommandParser) -> None:
    add = (group := parser.add_argument_group("generation")).add_argument
    tokens = "maximum tokens to generate; -1 is up to the context limit"
    add("--max-tokens", "-m", type=int, default=100, metavar="N", help=tokens)
    add_sampling_arguments(group)
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


def main(words: Sequence[str] | None = None) -> int:
    return run_command(build_parser(), run, words)


def run(args: argparse.Namespace) -> int:
    """Check the request, load the model, answer the prompt and show what it took; return the exit code."""
    request = Request.from_args(args)

    import mlx.core as mx

    from mlx_tq.cli.answer import answer_prompt
    from mlx_tq.cli.loading import calibrate_model, open_caches, open_prefix_folder
    from mlx_tq.cli.preflight import check_positions
    from mlx_tq.cli.prompts import embed_images, encode, read_prompt, render, template_config
    from mlx_tq.cli.ranks import join_ranks
    from mlx_tq.cli.screen import warn
    from mlx_tq.integration.probe import position_limit
    from mlx_tq.prefix_cache.prefix_cache import PrefixCache
    from mlx_tq.rescue import open_service
    from mlx_tq.session.shadow_mode import make_shadow
    from mlx_tq.session.text import PromptLengthLimit

    template_config(args)  # raises if it is not an object
    if request.rescue.service != OFF:
        open_service(request.rescue.service)  # raises if it is not an address
    ranks = join_ranks(request)
    folder = open_prefix_folder(request, ranks)
    schema = None if args.json_schema is None else ranks.broadcast(lambda: _read_schema(args.json_schema))
    prompt = ranks.broadcast(lambda: read_prompt(args))
    if args.seed is not None:
        mx.random.seed(args.seed)
    model, tokenizer, model_config = _load(args, ranks)
    text = render(tokenizer, prompt, args, continues=args.prompt_cache_file is not None)
    limit = position_limit(model)
    PromptLengthLimit(tokenizer, limit).check(len(text))
    options: dict[str, Any] = {}
    if args.image:
        text, options["input_embeddings"] = embed_images(model, tokenizer, model_config, text, args.image)
    ids = encode(tokenizer, text, args)
    check_positions(len(ids), limit)
    calibrate_model(model, tokenizer, request.config, name=args.model)
    opened = open_caches(model, request)
    plan = opened.plan
    max_tokens = _limit_tokens(opened, len(ids), limit, request)
    if args.verbose:
        _show_plan(opened, len(ids) + max(max_tokens, 0), request)
    options["sampler"] = _make_sampler(tokenizer, args, ranks)
    if schema is not None:
        options["logits_processors"] = [_make_constraint(schema, tokenizer, ids, args.json_schema)]
    prefix_cache = None if folder is None or plan is None else PrefixCache(model, plan, folder, warn)
    shadow = make_shadow(model, plan, request.shadow, has_prefix_cache=prefix_cache is not None)
    if shadow is not None:
        opened = opened._replace(caches=shadow.caches)
    extras: dict[str, Any] = {"prefix_cache": prefix_cache, "shadow": shadow}
    answer = answer_prompt(model, tokenizer, opened, prompt, ids, max_tokens, request, options, **extras)
    _report(answer, opened, args, shadow, ranks)
    return INTERRUPTED if answer.turn.finish_reason == "interrupted" else DONE


def _load(args: argparse.Namespace, ranks: "Ranks") -> tuple[Any, Any, dict[str, Any]]:
    """Return the model, by default that of the cache file, its tokenizer and its configuration."""
    from mlx_tq.cache.files import read_header  # loads mlx, which --help does without
    from mlx_tq.models import load  # likewise

    name = args.model
    if name is None and args.prompt_cache_file is not None:
        name = read_header(args.prompt_cache_file).model_name or None
    model, tokenizer, config = load(
        name,
        dtype=args.dtype,
        dequantize=args.dequantize,
        ranks=ranks,
        adapter_path=args.adapter_path,
        tokenizer_config={"trust_remote_code": args.trust_remote_code},
        model_config={"quantize_activations": args.quantize_activations},
        trust_remote_code=args.trust_remote_code,
        return_config=True,
    )
    for token in args.extra_eos_token:
        try:
            tokenizer.add_eos_token(token)
        except ValueError as error:
            raise ConfigError(f"--extra-eos-token: {error}. Give a token of its vocabulary, or its number.") from error
    return model, tokenizer, config


def _limit_tokens(opened: "PromptCache", prompt: int, limit: int | None, request: Request) -> int:
    """Return --max-tokens, cut to the model's context; raise ConfigError if context or memory are too small."""
    from mlx_tq.cli.preflight import check_memory, check_positions, free_memory  # loads mlx
    from mlx_tq.cli.screen import warn  # loads mlx
    from mlx_tq.prompt_cache.statistics import tokens_seen  # loads mlx

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
            remedy = "" if request.recall_blocker else f"; {flag} recalls them"
            warn(f"evicted tokens are dropped, and the answer may miss what they said{remedy}.")
        if limit is not None and tokens > _NEARLY_FULL * limit:
            warn(f"this run may reach {tokens:,} of {limit:,} positions. Eviction does not extend the context.")
    check_memory(plan, tokens, args.kv_memory_limit or free_memory())
    return max_tokens


def _show_plan(opened: "PromptCache", tokens: int, request: Request) -> None:
    from mlx_tq.cli.screen import note, show_plan  # loads mlx, which --help does without
    from mlx_tq.prompt_cache.statistics import tokens_seen  # likewise

    args = request.args
    if opened.plan is not None:
        show_plan(opened.plan, tokens_seen(opened.caches) + tokens, request.recall_blocker)
    elif args.kv_bits is None:
        note("KV cache: mlx-lm's own")
    else:
        note(f"KV cache: mlx-lm's own, at {args.kv_bits} bits from {args.quantized_kv_start:,} tokens on")


def _make_sampler(tokenizer: Any, args: argparse.Namespace, ranks: "Ranks") -> Any:
    from mlx_lm.sample_utils import make_sampler  # loads mlx, which --help does without

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


def _read_schema(path: str) -> dict[str, Any]:
    try:
        schema = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--json-schema {path} cannot be read: {error}. Give a JSON file.") from error
    if not isinstance(schema, dict):
        raise ConfigError(f"--json-schema {path} holds {schema!r:.80}; it must be a JSON object.")
    return schema


def _make_constraint(schema: dict[str, Any], tokenizer: Any, ids: list[int], path: str) -> Any:
    """Return the logits processor that holds the answer to a schema, after the thoughts that the prompt may open."""
    import asyncio  # of use here only

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
        part = ".".join(error.path) or "the schema"
        raise ConfigError(f"--json-schema {path}: {part}: {error}.") from error
    finally:
        grammars.close()


def _report(answer: Any, opened: "PromptCache", args: argparse.Namespace, shadow: Any, ranks: "Ranks") -> None:
    """Show the statistics of an answer, or print it as JSON."""
    from mlx_tq.cli.ranks import collect_stats, show_ranks  # loads mlx, which --help does without
    from mlx_tq.cli.screen import plan_dict, show_restored, show_shadow, show_stats  # likewise
    from mlx_tq.session.restore import take_archive_warning  # likewise

    ranks.synchronize()
    rank_stats = collect_stats(ranks, answer.cache, take_archive_warning(opened.caches))
    if args.json:
        report = answer.to_dict() | {"plan": plan_dict(opened.plan, answer.cache.tokens) if opened.plan else None}
        if shadow is not None:
            report["shadow"] = shadow.report().to_dict()
        if not ranks.is_alone:
            report["ranks"] = rank_stats
        sys.stdout.write(json.dumps(report) + "\n")
    elif args.verbose:
        show_restored(answer.turn, can_recall=answer.can_recall)
        show_stats(answer.turn, answer.cache)
        if shadow is not None:
            show_shadow(shadow.report())
        if not ranks.is_alone:
            show_ranks(rank_stats)


if __name__ == "__main__":
    sys.exit(main())
