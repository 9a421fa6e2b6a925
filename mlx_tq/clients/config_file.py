"""Merge settings into a client's JSON, TOML or YAML file, and keep a copy of the file as it was."""

import json
import shutil
import stat
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from mlx_tq.errors import ConfigError, one_line
from mlx_tq.files import atomic_write

COPY_SUFFIX = ".before-mlx-tq"
_OWNER_ONLY = 0o600  # some files hold the API key


def merge_settings(path: Path, settings: Mapping[str, Any]) -> str:
    """Return the text of the file at `path` with the settings in it; all others stay.

    Of a list, entries with the `id` or `name` of one of ours are replaced. Raises ConfigError if the file cannot be
    read or parsed.
    """
    document = _read(path)
    _merge(document, settings)
    return _format(path.suffix, document)


def find_changed_settings(path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the settings that the file at `path` does not have, or has with another value."""
    return _changes(_read(path), settings)


def _read(path: Path) -> MutableMapping[str, Any]:
    try:
        return _parse(path.suffix, path.read_text(encoding="utf-8") if path.exists() else "")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read as {path.suffix[1:].upper()} ({one_line(error)}) and is left as it is. Repair it, "
            "or add the settings yourself: without --write they are printed."
        ) from error


def _changes(document: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    changed = {}
    for name, value in settings.items():
        current = document.get(name)
        if isinstance(value, Mapping) and isinstance(current, Mapping):
            value = _changes(current, value)
            is_changed = bool(value)
        elif isinstance(value, list) and isinstance(current, list):
            is_changed = any(entry not in current for entry in value)
        else:
            is_changed = name not in document or value != current
        if is_changed:
            changed[name] = value
    return changed


def settings_text(suffix: str, settings: Mapping[str, Any]) -> str:
    """Return a file that has only these settings."""
    document = _parse(suffix, "")
    _merge(document, settings)
    return _format(suffix, document)


def write_text(path: Path, text: str) -> bool:
    """Write the file unless it has this text already; return whether it was written. The first copy of it is kept."""
    mode = _OWNER_ONLY
    if path.exists():
        if path.read_text(encoding="utf-8") == text:
            return False
        mode = stat.S_IMODE(path.stat().st_mode) & ~stat.S_IRWXO
        copy = path.with_name(path.name + COPY_SUFFIX)
        if not copy.exists():
            shutil.copy2(path, copy)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        temporary.touch(mode)
        temporary.chmod(mode)
        temporary.write_text(text, encoding="utf-8")
    return True


def _parse(suffix: str, text: str) -> MutableMapping[str, Any]:
    """Parse a document; raise ValueError if it has no settings by name. An empty one is an empty mapping."""
    document: Any = {}
    if suffix == ".toml":
        document = _tomlkit().parse(text)
    elif suffix == ".yaml":
        import yaml  # comes with mlx-lm; only one client needs it

        try:
            document = yaml.safe_load(text) or {}
        except yaml.YAMLError as error:
            raise ValueError(str(error)) from error
    elif text.strip():
        document = json.loads(text)
    if not isinstance(document, MutableMapping):
        raise ValueError(f"it holds a {type(document).__name__} in place of settings")
    return document


def _format(suffix: str, document: MutableMapping[str, Any]) -> str:
    if suffix == ".toml":
        return str(_tomlkit().dumps(document))
    if suffix == ".yaml":
        import yaml  # as above

        return str(yaml.safe_dump(document, sort_keys=False, allow_unicode=True))
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _tomlkit() -> Any:
    try:
        import tomlkit  # of the extra, and only one client needs it
    except ImportError as error:
        raise ConfigError("files in TOML need tomlkit: pip install 'mlx-tq[server]'.") from error
    return tomlkit


def _merge(document: MutableMapping[str, Any], settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        current = document.get(name)
        if isinstance(value, Mapping) and isinstance(current, MutableMapping):
            _merge(current, value)
        elif isinstance(value, list) and isinstance(current, list):
            names = [_name_of(entry) for entry in value]
            document[name] = [*value, *(entry for entry in current if _name_of(entry) not in names)]
        else:
            document[name] = value


def _name_of(entry: Any) -> Any:
    return entry.get("id", entry.get("name")) if isinstance(entry, Mapping) else entry
