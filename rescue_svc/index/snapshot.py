"""An index on disk: a header line, then the engine's bytes, believed only after its checksum was seen to match."""

import hashlib
import json
import logging
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rescue_svc.index.engines import ENGINES, Engine, EngineName
from rescue_svc.store.files import INDEXES, write_durably

log = logging.getLogger(__name__)

_NAME = re.compile(r"(\d+)\.index(\.partial|\.bad-\d+)?")


@dataclass(frozen=True)
class Header:
    """What the bytes after it hold."""

    engine: EngineName
    model: str
    dim: int
    count: int
    last: int  # sequence number of the newest vector in it
    blake2b: str


def save(path: Path, engine: Engine, model: str, dim: int, last: int) -> None:
    """Write a snapshot in one step; a crash leaves the old one."""
    body = engine.to_bytes()
    header = Header(engine.name, model, dim, len(engine), last, "")
    write_durably(path, json.dumps(asdict(header) | {"blake2b": _digest(header, body)}).encode(), b"\n", body)


def load(path: Path, engine: EngineName, model: str, dim: int) -> tuple[Engine, int] | None:
    """Return the engine and its last sequence number; None if there is no snapshot for this engine and model.

    A file that is not what was written is renamed aside, and the index is built from the store.
    """
    if not path.exists():
        return None
    line, _, body = path.read_bytes().partition(b"\n")
    try:
        header = Header(**json.loads(line))
        whole = header.blake2b == _digest(header, body)
    except (ValueError, TypeError):
        whole = False
    if not whole:
        aside = path.with_name(f"{path.name}.bad-{time.time_ns()}")
        path.rename(aside)
        log.warning("an index file is damaged; it is renamed and the index built again", extra={"file": aside.name})
        return None
    if (header.engine, header.model, header.dim) != (engine, model, dim):
        return None
    return ENGINES[engine].from_bytes(body, dim), header.last


def path_of(directory: Path, session: int) -> Path:
    """Return where a session's snapshot is in the data directory."""
    return directory / INDEXES / f"{session}.index"


def remove(directory: Path, session: int) -> None:
    """Remove a session's snapshot and all that was renamed aside: it is forgotten."""
    path = path_of(directory, session)
    for file in path.parent.glob(path.name + "*"):
        if _NAME.fullmatch(file.name):
            file.unlink()


def remove_orphans(directory: Path, sessions: set[int]) -> None:
    """Remove the snapshots of sessions that are not among these: a crash came between forgetting and removing.

    By name: whatever else is in that folder is not ours.
    """
    for file in (directory / INDEXES).glob("*.index*"):
        named = _NAME.fullmatch(file.name)
        if named and int(named[1]) not in sessions:
            file.unlink()


def _digest(header: Header, body: bytes) -> str:
    fields = json.dumps(asdict(header) | {"blake2b": ""}).encode()
    return hashlib.blake2b(fields + b"\n" + body).hexdigest()
