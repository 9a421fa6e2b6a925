"""The store of prefixes that a command's flags name."""

import argparse
from collections.abc import Sequence

from mlx_tq.cli.args import STORE, STORE_LIMIT, option_value
from mlx_tq.distributed.group import ALONE, Ranks
from mlx_tq.errors import ConfigError
from mlx_tq.prefix_cache.folder import LIMIT, Folder
from mlx_tq.prefix_cache.prefix_cache import OFF, open_folder


def chosen_store(args: argparse.Namespace, others: Sequence[str] = (), ranks: Ranks = ALONE) -> Folder | None:
    """The folder of --prefix-cache and --prefix-cache-limit, or of the environment; None where nothing is to be stored.

    Args:
        args: the flags.
        others: what is asked for too and cannot be stored; then a store that just the environment names is none.
        ranks: that run the command together.

    Raises:
        ConfigError: it cannot be used, cannot be combined, or a limit is given without a store.
    """
    if others:
        if option_value(args, STORE, {}) not in (None, OFF):
            raise ConfigError(f"--prefix-cache cannot be combined with {others[0]}. Drop one of the two.")
        return None
    folder = open_folder(option_value(args, STORE), option_value(args, STORE_LIMIT) or LIMIT, ranks)
    if folder is None and option_value(args, STORE_LIMIT, {}) is not None:
        raise ConfigError("--prefix-cache-limit is given, but nothing is stored: add --prefix-cache auto, or drop it.")
    return folder
