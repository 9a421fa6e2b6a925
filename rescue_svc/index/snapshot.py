"""An index on disk: a header line and the engine's bytes, used only if the checksum matches."""

import hashlib
import json
import logging
import re
import time
from collections.abc import Container
from pathlib import Path
from typing import Any

from rescue_svc.index.engines import FaissEngine
from rescue_svc.store.files import INDEXES, write_durably

log = logging.getLogger(__name__)

_NAME = re.compile(r"(\d+)\.index(\.partial|\.bad-\d+)?")


def save(directory: Path, session: int, engine: FaissEngine, model: str, dim: int, last: int) -> None:
    """Write a snapshot in one step, so that a crash leaves the old one; `last` numbers the newest vector in it."""
    body = engine.to_bytes()
    header = {"model": model, "dim": dim, "count": len(engine), "last": last}
    write_durably(
        _path(directory, session), json.dumps(header | {"blake2b": _digest(header, body)}).encode(), b"\n", body
    )


def load(directory: Path, session: int, model: str, dim: int) -> tuple[FaissEngine, int] | None:
    """Return the engine and its last sequence number; None without a valid snapshot for this model."""
    path = _path(directory, session)
    if not path.exists():
        return None
    line, _, body = path.read_bytes().partition(b"\n")
    try:
        header = json.loads(line)
        is_intact = header.pop("blake2b") == _digest(header, body)
    except (ValueError, LookupError, TypeError, AttributeError):
        is_intact = False
    if not is_intact:
        renamed = path.rename(path.with_name(f"{path.name}.bad-{time.time_ns()}"))
        log.warning("an index file is damaged; it is renamed and the index rebuilt", extra={"file": renamed.name})
        return None
    if (header["model"], header["dim"]) != (model, dim):
        return None
    return FaissEngine.from_bytes(body, dim), header["last"]


def _path(directory: Path, session: int) -> Path:
    return directory / INDEXES / f"{session}.index"


def remove(directory: Path, session: int | None = None, *, keep: Container[int] = ()) -> None:
    """Delete the snapshots of a session or of all but `keep`, and damaged ones that were renamed. Other files stay."""
    for file in (directory / INDEXES).glob(f"{'*' if session is None else session}.index*"):
        name = _NAME.fullmatch(file.name)
        if name and int(name[1]) not in keep:
            file.unlink()


def _digest(header: dict[str, Any], body: bytes) -> str:
    fields = json.dumps(header | {"blake2b": ""}).encode()
    return hashlib.blake2b(fields + b"\n" + body).hexdigest()
