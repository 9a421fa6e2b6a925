"""What the flags of `mlx_tq.server` must meet before a model is loaded for them."""

import argparse
import logging
import os
import socket
import sys

from http_limits.log_limit import LogLimit
from mlx_tq.cli.args import KEY_VARIABLE, config_from_args
from mlx_tq.cli.frame import DONE
from mlx_tq.cli.joining import join_ranks
from mlx_tq.cli.preflight import check_arguments
from mlx_tq.cli.stores import chosen_store
from mlx_tq.errors import ConfigError

_AT_LEAST = {
    "decode_concurrency": 1,
    "prompt_concurrency": 1,
    "max_queue": 1,
    "max_tokens": 1,
    "prompt_cache_size": 0,
    "sessions": 0,
}


def run(args: argparse.Namespace) -> int:
    """Serve until a signal ends it; returns the exit code.

    Raises:
        MlxTqError: whatever stands in the way, before the model is loaded where that can be known.
    """
    try:
        from mlx_tq.server import guard, process  # their packages are an extra, which may not be installed
    except ImportError as error:
        raise ConfigError(f"the server needs {error.name}: pip install 'mlx-tq[server]'.") from error
    _check(args)
    ranks = join_ranks(args)
    folder = chosen_store(args, ["mlx-lm's own caches"] if config_from_args(args).is_off else [], ranks)
    if folder is None and args.prefix_cache_share:
        raise ConfigError("--prefix-cache-share is given, but nothing is stored: add --prefix-cache auto, or drop it.")
    log = logging.StreamHandler(sys.stderr)
    log.addFilter(LogLimit())
    logging.basicConfig(level=args.log_level, format="%(asctime)s %(levelname)s %(message)s", handlers=[log])
    key = args.api_key or os.environ.get(KEY_VARIABLE)

    def listen() -> socket.socket:
        if not key and not guard.is_loopback(args.host):
            raise ConfigError(f"others can reach {args.host}: set {KEY_VARIABLE} to a key that clients must send.")
        return process.listen(args.host, args.port)

    listener = ranks.run_on_first(listen)
    if listener is None:
        process.follow(args, folder, ranks)
    else:
        with listener:
            process.serve(args, key, folder, listener, ranks)
    return DONE


def _check(args: argparse.Namespace) -> None:
    check_arguments(args)
    for name, least in _AT_LEAST.items():
        if getattr(args, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be {least} or more.")
    if not (args.temp >= 0 and 0 <= args.top_p <= 1 and 0 <= args.min_p <= 1 and args.top_k >= 0):
        raise ConfigError("--temp and --top-k must be 0 or more, --top-p and --min-p between 0 and 1.")
    if not 0 <= args.port < 65536:
        raise ConfigError(f"--port is {args.port}; it must be between 0 and 65535.")
    if config_from_args(args).is_off and args.kv_memory_limit is not None:
        raise ConfigError("--kv-memory-limit is for compressed caches, and mlx-lm's own was chosen. Drop it.")
