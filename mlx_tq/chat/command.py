"""The session that the flags of `mlx_tq.chat` describe."""

import argparse

from mlx_lm.sample_utils import make_sampler

from mlx_tq.cache.files import check_config
from mlx_tq.chat.loop import Chat
from mlx_tq.chat.screen import show_banner, show_last_exchange
from mlx_tq.cli.args import (
    SHADOW,
    chooses_rescue,
    config_from_args,
    names_cache,
    option_value,
    rescue_from_args,
    with_blocks,
)
from mlx_tq.cli.joining import join_ranks
from mlx_tq.cli.loading import load_chosen
from mlx_tq.cli.preflight import check_arguments
from mlx_tq.cli.prompts import template_config
from mlx_tq.cli.screen import console, show_shadow
from mlx_tq.cli.stores import chosen_store
from mlx_tq.config import RescueConfig
from mlx_tq.errors import ConfigError
from mlx_tq.prompt_cache.files import with_formats
from mlx_tq.rescue import AUTO, OFF
from mlx_tq.session import Session

_START_S = 60.0


def run(args: argparse.Namespace) -> int:
    """Chat until the end of the input; returns the exit code.

    Raises:
        MlxTqError: whatever stands in the way of a conversation.
    """
    check_arguments(args)
    if args.load is not None and args.system_prompt is not None:
        raise ConfigError("--system-prompt is given, but the conversation of --load has begun; drop one of the two.")
    ranks = join_ranks(args)
    config = config_from_args(args)
    rescue = rescue_from_args(args, default=AUTO if config.evict else OFF)
    in_blocks = rescue.service != OFF  # on every rank
    if in_blocks:
        config = with_blocks(config, args)
    if not ranks.is_first:  # the first one asks for all
        rescue = RescueConfig(service=OFF)
    model, tokenizer = load_chosen(args, ranks=ranks)
    warnings: list[str] = []
    with Session(
        model,
        tokenizer,
        config,
        rescue=rescue if chooses_rescue(args) or config.evict else None,
        system_prompt=args.system_prompt,
        template=template_config(args),
        max_tokens=args.max_tokens,
        prefill_step_size=args.prefill_step_size,
        sampler=ranks.share_sampler(make_sampler(args.temp, args.top_p, args.min_p, top_k=args.top_k)),
        seed=args.seed,
        store=chosen_store(args, ranks=ranks),
        shadow=option_value(args, SHADOW),
        warn=warnings.append,
    ) as session:
        if args.load is not None:
            _load(session, args, in_blocks=in_blocks)
        show_banner(session)
        show_last_exchange(session)
        if session.rescue.service == AUTO and session.client is not None:
            session.client.ready(_START_S)
        console.print("type a message; /help shows what else there is", style="dim")
        code = Chat(session, warnings, ranks).run()
        if session.shadow is not None:
            show_shadow(session.shadow.report())
        return code


def _load(session: Session, args: argparse.Namespace, *, in_blocks: bool) -> None:
    """Go on with a conversation as it was saved, which flags about its cache can only repeat."""
    session.load(args.load)
    if names_cache(args):
        wanted = config_from_args(args, {}, base=session.config)
        wanted = with_formats(session.model, with_blocks(wanted, args, {}) if in_blocks else wanted)
        check_config(args.load, session.config, wanted)
