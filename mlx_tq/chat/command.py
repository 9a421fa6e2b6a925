"""Flags of `mlx_tq.chat`, and the session that they describe."""

import argparse

import mlx.core as mx
from mlx_lm.sample_utils import make_sampler

from mlx_tq.args import (
    add_cache_arguments,
    add_rescue_arguments,
    choose_impl,
    config_from_args,
    rescue_from_args,
    with_blocks,
)
from mlx_tq.chat.loop import Chat
from mlx_tq.limits import check_arguments
from mlx_tq.models import load
from mlx_tq.prompts import template_config
from mlx_tq.rescue import AUTO, OFF
from mlx_tq.session import Session
from mlx_tq.ui import console, show_plan

_START_S = 60.0


def build_parser() -> argparse.ArgumentParser:
    """mlx_lm.chat's flags, and ours."""
    parser = argparse.ArgumentParser(
        prog="mlx_tq.chat", description="Chat with an mlx-lm model on a compressed KV cache. /help shows what to type."
    )
    parser.add_argument("--model", help="folder or hub name (default: the embedded model)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code of the tokenizer's repository")
    parser.add_argument("--adapter-path", help="folder of adapters that mlx_lm.lora made")
    parser.add_argument("--system-prompt", help="what the conversation begins with")
    parser.add_argument("--chat-template-config", help="JSON object of options of the chat template")
    parser.add_argument("--load", metavar="FILE", help="go on with a conversation that /save wrote")
    parser.add_argument("--max-tokens", "-m", type=int, default=512, help="of an answer (default: 512)")
    parser.add_argument("--prefill-step-size", type=int, default=512, help="tokens read at a time (default: 512)")
    parser.add_argument("--temp", type=float, default=0.0, help="sampling temperature (default: 0)")
    parser.add_argument("--top-p", type=float, default=1.0, help="sampling top-p (default: 1)")
    parser.add_argument("--top-k", type=int, default=0, help="sampling top-k (default: off)")
    parser.add_argument("--min-p", type=float, default=0.0, help="sampling min-p (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default: 0)")
    add_cache_arguments(parser)
    add_rescue_arguments(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Chat until the end of the input; returns the exit code.

    Raises:
        MlxTqError: whatever stands in the way of a conversation.
    """
    check_arguments(args)
    choose_impl(args)
    config = config_from_args(args)
    rescue = rescue_from_args(args, default=AUTO if config.evict else OFF)
    if rescue.service != OFF:
        config = with_blocks(config, args)
    mx.random.seed(args.seed)
    model, tokenizer = load(
        args.model,
        adapter_path=args.adapter_path,
        tokenizer_config={"trust_remote_code": args.trust_remote_code},
        trust_remote_code=args.trust_remote_code,
    )
    warnings: list[str] = []
    with Session(
        model,
        tokenizer,
        config,
        rescue=rescue,
        system_prompt=args.system_prompt,
        template=template_config(args),
        max_tokens=args.max_tokens,
        prefill_step_size=args.prefill_step_size,
        sampler=make_sampler(args.temp, args.top_p, args.min_p, top_k=args.top_k),
        warn=warnings.append,
    ) as session:
        if session.plan is not None:
            show_plan(session.plan, session.positions or 32768)
        if args.load is not None:
            session.load(args.load)
        if rescue.service == AUTO and session.client is not None:
            session.client.ready(_START_S)
        console.print("type a message; /help shows what else there is", style="dim")
        return Chat(session, warnings).run()
