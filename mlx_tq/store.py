"""`mlx_tq.store`: list, check or clear the prefix cache."""

import argparse
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_tq.cli.options import AUTO, OFF, read_options
from mlx_tq.cli.parser import CommandParser, command_parser
from mlx_tq.cli.runner import DONE, command_main
from mlx_tq.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_tq.prefix_cache.folder import Folder

_ACTIONS = {
    "list": "list the entries, the most recently used first",
    "check": "read every entry and remove damaged ones",
    "clear": "remove every entry",
}


def build_parser() -> CommandParser:
    parser = command_parser("store", "Manage the prefix cache.", None)
    actions = parser.add_subparsers(dest="action", required=True, metavar="{list,check,clear}")
    for name, description in _ACTIONS.items():
        add = actions.add_parser(name, help=description, description=description).add_argument
        folder = "folder of the prefix cache; falls back to MLX_TQ_PREFIX_CACHE (default: auto)"
        add("--prefix-cache", metavar="DIR|auto", help=folder)
        add("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def run(args: argparse.Namespace) -> int:
    from mlx_tq.prefix_cache.folder import RANK, Folder, open_folder

    name = read_options(args, os.environ)["--prefix-cache"] or AUTO
    if name not in (AUTO, OFF) and not Path(name).expanduser().is_dir():
        raise ConfigError(f"--prefix-cache: no such folder: {name}. Name a folder, or auto.")
    folder = open_folder(name)
    if folder is None:
        raise ConfigError("--prefix-cache is off. Name a folder, or auto.")

    from mlx_tq.cli.screen import human_bytes, stdout, table

    folders = [folder, *(Folder(path) for path in sorted(folder.path.glob(f"{RANK}*-of-*")) if path.is_dir())]
    if args.action == "list":
        report = _list(folders)
    elif args.action == "check":
        entries, damaged = map(sum, zip(*(part.check() for part in folders), strict=True))
        report = {"entries": entries, "damaged_and_removed": damaged}
    else:
        report = {"bytes_removed": sum(part.clear() for part in folders)}
    if args.json:
        sys.stdout.write(json.dumps(report) + "\n")
    elif args.action == "list":
        blocks, checkpoints = report["blocks"], report["checkpoints"]
        counts = f"{human_bytes(report['nbytes'])}, {blocks:,} blocks, {len(checkpoints):,} checkpoints"
        sys.stdout.write(f"{report['folder']}: {counts}\n")
        rows = table("", "tokens", "blocks", "own bytes", "last used", "key")
        for entry in checkpoints:
            size = human_bytes(entry["nbytes"])
            rows.add_row(f"{entry['tokens']:,}", str(entry["blocks"]), size, entry["used"], entry["key"][:12])
        if checkpoints:
            stdout.print(rows)
    else:
        sys.stdout.write(", ".join(f"{name.replace('_', ' ')}: {value:,}" for name, value in report.items()) + "\n")
    return DONE


def _list(folders: "Sequence[Folder]") -> dict[str, Any]:
    """Return what the first folder has, and those of ranks inside it."""
    from mlx_tq.prefix_cache.folder import BLOCKS  # loads mlx, which --help does without

    records = sorted(record for folder in folders for record in folder.records())
    summaries = {key: summary for folder in folders for key, summary in folder.checkpoints().items()}
    checkpoints = []
    for record in reversed(records):
        if (summary := summaries.get(record.path.name)) is not None:
            used = datetime.fromtimestamp(record.time / 1e9, UTC).isoformat(timespec="seconds")
            entry = {"key": record.path.name, "used": used, "nbytes": record.size}
            checkpoints.append({**entry, "tokens": len(summary.tokens), "blocks": len(summary.block_keys)})
    blocks = sum(record.path.parent.name == BLOCKS for record in records)
    nbytes = sum(record.size for record in records)
    return {"folder": str(folders[0].path), "nbytes": nbytes, "blocks": blocks, "checkpoints": checkpoints}


main = command_main(build_parser, run)

if __name__ == "__main__":
    sys.exit(main())
