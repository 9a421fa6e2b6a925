"""What works on this machine, and what would help."""

import platform
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from rescue_svc.embed import choose_embedder
from rescue_svc.embed.minilm import find_model, verify_weights
from rescue_svc.errors import DirectoryInUseError, RescueServiceError
from rescue_svc.index import choose_engine
from rescue_svc.opening import open_all
from rescue_svc.settings import Settings


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    what: str
    ok: bool
    says: str


def examine(settings: Settings) -> list[Finding]:
    """Look at everything that the service needs. Opening the store checks it, if it was not closed cleanly."""
    return [
        Finding("python", True, f"{platform.python_version()} on {platform.platform(terse=True)}"),
        _fts5(),
        _check("index", lambda: _index(settings)),
        _check("embedder", lambda: _embedder(settings)),
        _check("store", lambda: _store(settings)),
    ]


def _check(what: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(what, True, look())
    except RescueServiceError as error:
        return Finding(what, False, str(error))


def _fts5() -> Finding:
    options = {row[0] for row in sqlite3.connect(":memory:").execute("PRAGMA compile_options")}
    ok = "ENABLE_FTS5" in options
    says = f"{sqlite3.sqlite_version}, FTS5 {'built in' if ok else 'missing: use a Python whose SQLite has it'}"
    return Finding("sqlite", ok, says)


def _index(settings: Settings) -> str:
    if settings.store is not None:
        return "an exact scan, in the database" if settings.index == "exact" else "pgvector's HNSW, in the database"
    engine = choose_engine(settings.index)
    if engine == "numpy":
        return "numpy; `pip install faiss-cpu` searches large sessions faster"
    return f"faiss {_version('faiss-cpu')}"


def _embedder(settings: Settings) -> str:
    chosen, why_not = choose_embedder(settings.embedder, settings.model_path)
    if chosen is None:
        return f"none, BM25 answers alone: {why_not}"
    if chosen.name != "minilm":
        return chosen.name if chosen.folder is None else f"{chosen.name} in {chosen.folder}, its vectors {chosen.model}"
    folder = find_model(settings.model_path)
    verify_weights(folder)
    return f"minilm in {folder}, weights verified, torch {_version('torch')}"


def _store(settings: Settings) -> str:
    if settings.store is None and not settings.data_dir.exists():
        return f"{settings.data_dir} will be made"
    try:
        store, _ = open_all(settings)
    except DirectoryInUseError:
        return f"{settings.data_dir} is in use by a running service"
    sessions = store.sessions()
    store.close()
    whole = ", all whole" if settings.store is None else ""
    return f"{store.about()}: {len(sessions)} sessions, {sum(s.spans for s in sessions)} spans{whole}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"
