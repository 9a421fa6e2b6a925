"""The work of `mlx_tq.store`."""

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mlx_tq.cli.args import STORE, option_value
from mlx_tq.cli.screen import human_bytes, results, table
from mlx_tq.errors import ConfigError
from mlx_tq.prefix_cache.folder import BLOCKS, CHECKPOINTS, Folder
from mlx_tq.prefix_cache.prefix_cache import AUTO, OFF, open_folder
from mlx_tq.prefix_cache.records import describe_checkpoint


def run(args: argparse.Namespace) -> int:
    """List, check or clear; returns the exit code.

    Raises:
        ConfigError: the folder is no store.
    """
    chosen = option_value(args, STORE) or AUTO
    if chosen not in (AUTO, OFF) and not Path(chosen).is_dir():
        raise ConfigError(f"--prefix-cache {chosen} is no folder; name that of a store, or auto.")
    folder = open_folder(chosen)
    if folder is None:
        raise ConfigError("--prefix-cache is off; name the folder of a store, or auto.")
    report = _ACTIONS[args.action](folder)
    if args.json:
        sys.stdout.write(json.dumps(report) + "\n")
    elif args.action == "list":
        _show(report)
    else:
        sys.stdout.write(", ".join(f"{name.replace('_', ' ')}: {value:,}" for name, value in report.items()) + "\n")
    return 0


def _list(folder: Folder) -> dict[str, Any]:
    records = folder.records()
    points = []
    for record in reversed(records):
        if record.path.parent.name == CHECKPOINTS:
            data = folder.read(CHECKPOINTS, record.path.name, touch=False)
            if data is not None:
                used = datetime.fromtimestamp(record.last_used / 1e9, UTC).isoformat(timespec="seconds")
                about = {"key": record.path.name, "used": used, "nbytes": record.size, "protected": record.is_protected}
                points.append({**about, **describe_checkpoint(data)})
    blocks = sum(record.path.parent.name == BLOCKS for record in records)
    nbytes = sum(record.size for record in records)
    return {"folder": str(folder.path), "nbytes": nbytes, "blocks": blocks, "points": points}


def _check(folder: Folder) -> dict[str, Any]:
    records, damaged = folder.check()
    return {"records": records, "damaged_and_removed": damaged}


def _clear(folder: Folder) -> dict[str, Any]:
    return {"bytes_removed": folder.clear()}


_ACTIONS = {"list": _list, "check": _check, "clear": _clear}


def _show(report: dict[str, Any]) -> None:
    blocks, points = report["blocks"], report["points"]
    sys.stdout.write(
        f"{report['folder']}: {human_bytes(report['nbytes'])}, {blocks:,} blocks, {len(points):,} resume points\n"
    )
    shown = table("", "tokens", "blocks", "of its own", "last used", "key", "")
    for point in points:
        size = human_bytes(point["nbytes"])
        shared = "shared" if point["protected"] else ""
        shown.add_row(f"{point['tokens']:,}", str(point["blocks"]), size, point["used"], point["key"][:12], shared)
    if points:
        results.print(shown)
