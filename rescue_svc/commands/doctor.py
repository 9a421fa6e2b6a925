"""Check what works on this machine."""

# ruff: noqa: T201 - prints the output of a command

import json
import platform
import sqlite3
from collections.abc import Callable
from contextlib import closing
from importlib.metadata import version

from rescue_svc.embed import choose_embedder
from rescue_svc.embed.sentence_models import find_minilm, verify_minilm
from rescue_svc.errors import DirectoryInUseError, RescueServiceError
from rescue_svc.opening import open_all
from rescue_svc.settings import Settings


def run(settings: Settings, as_json: bool = False) -> None:
    """Check everything that the service needs. A store that was not closed cleanly is verified when it is opened."""
    findings = []
    for what, describe in CHECKS.items():
        try:
            ok, says = True, describe(settings)
        except RescueServiceError as error:
            ok, says = False, str(error)
        findings.append({"what": what, "ok": ok, "says": says})
        if not as_json:
            print(f"{'ok ' if ok else 'BAD'} {what:<9} {says}")
    if as_json:
        print(json.dumps(findings, indent=2))
    if not all(finding["ok"] for finding in findings):
        raise RescueServiceError("some checks failed; see the lines marked BAD")


def _describe_sqlite(settings: Settings) -> str:
    with closing(sqlite3.connect(":memory:")) as connection:
        options = {row[0] for row in connection.execute("PRAGMA compile_options")}
    if "ENABLE_FTS5" not in options:
        raise RescueServiceError(f"{sqlite3.sqlite_version}, FTS5 missing: use a Python whose SQLite has it")
    return f"{sqlite3.sqlite_version}, FTS5 built in"


def _describe_index(settings: Settings) -> str:
    if settings.store is not None:
        return "an exact scan, in the database" if settings.index == "exact" else "pgvector's HNSW, in the database"
    return f"faiss {version('faiss-cpu')}"


def _describe_embedder(settings: Settings) -> str:
    chosen, reason = choose_embedder(settings.embedder, settings.model_path)
    if chosen is None:
        return f"none, only keyword search is used: {reason}"
    if chosen.name != "minilm":
        return chosen.name if chosen.folder is None else f"{chosen.name} in {chosen.folder}, its vectors {chosen.model}"
    folder = find_minilm(settings.model_path)
    verify_minilm(folder)
    return f"minilm in {folder}, weights verified, sentence-transformers {version('sentence-transformers')}"


def _describe_store(settings: Settings) -> str:
    if settings.store is None and not settings.data_dir.exists():
        return f"{settings.data_dir} will be created"
    try:
        store, _ = open_all(settings)
    except DirectoryInUseError:
        return f"{settings.data_dir} is in use by a running service"
    with closing(store):
        sessions = store.sessions()
    intact = ", all intact" if settings.store is None else ""
    return f"{store.describe()}: {len(sessions)} sessions, {sum(s.spans for s in sessions)} spans{intact}"


CHECKS: dict[str, Callable[[Settings], str]] = {
    "python": lambda _: f"{platform.python_version()} on {platform.platform(terse=True)}",
    "sqlite": _describe_sqlite,
    "index": _describe_index,
    "embedder": _describe_embedder,
    "store": _describe_store,
}
