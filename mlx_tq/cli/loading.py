"""The model that a command's flags name."""

import argparse
from typing import Any

from mlx_tq.cli.args import config_from_args
from mlx_tq.cli.asking import ask_beforehand
from mlx_tq.config import KVConfig
from mlx_tq.distributed.group import ALONE, Ranks
from mlx_tq.models import load


def load_chosen(
    args: argparse.Namespace, *configs: KVConfig, ranks: Ranks = ALONE, **tokenizer_config: Any
) -> tuple[Any, Any]:
    """Load the model of --model, --adapter-path, --dtype, --dequantize and --trust-remote-code, and its tokenizer.

    Of several ranks each gets its part. See that all is known of the model that the flags of the cache, and further
    `configs`, ask to know.

    Raises:
        MlxTqError: as `models.load`, and as `ask_beforehand`.
    """
    model, tokenizer = load(
        args.model,
        dtype=args.dtype,
        dequantize=args.dequantize,
        ranks=ranks,
        adapter_path=getattr(args, "adapter_path", None),
        tokenizer_config={"trust_remote_code": args.trust_remote_code, **tokenizer_config},
        trust_remote_code=args.trust_remote_code,
    )
    if hasattr(args, "kv_evict"):
        ask_beforehand(model, tokenizer, config_from_args(args), *configs)
    return model, tokenizer
