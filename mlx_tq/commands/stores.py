"""The store of prefixes that a command's flags name."""

import argparse

from mlx_tq.commands.args import STORE, STORE_LIMIT, option_value
from mlx_tq.errors import ConfigError
from mlx_tq.prefixes.folder import LIMIT, Folder
from mlx_tq.prefixes.store import open_folder


def chosen_store(args: argparse.Namespace) -> Folder | None:
    """The folder of --kv-store and --kv-store-limit, or of the environment; None where nothing is to be stored.

    Raises:
        ConfigError: it cannot be used, or a limit is given without a store.
    """
    folder = open_folder(option_value(args, STORE), option_value(args, STORE_LIMIT) or LIMIT)
    if folder is None and option_value(args, STORE_LIMIT, {}) is not None:
        raise ConfigError("--kv-store-limit is given, but nothing is stored: add --kv-store auto, or drop it.")
    return folder
