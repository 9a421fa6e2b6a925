"""Copy the database, also while the service runs."""

# ruff: noqa: T201 - prints the output of a command

from pathlib import Path

from rescue_svc.settings import Settings
from rescue_svc.store import copies


def run(settings: Settings, folder: str) -> None:
    path = Path(folder).expanduser().absolute()
    if settings.store is None:
        size, use = copies.backup(settings.data_dir, path), "use it with --data-dir"
    else:
        from rescue_svc.postgres import dump  # psycopg, which only its users have

        size, use = dump.backup(settings.store.get_secret_value(), path), f"pg_restore takes {dump.DUMP}"
    print(f"{folder}: {size} bytes; {use}. Forgetting a session does not affect backups")
