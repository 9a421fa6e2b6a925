"""Build a new database from every intact span, and delete the index files."""

# ruff: noqa: T201 - prints the output of a command

from rescue_svc.errors import SettingsError
from rescue_svc.index import remove_orphans
from rescue_svc.settings import Settings
from rescue_svc.store import copies


def run(settings: Settings) -> None:
    if settings.store is not None:
        raise SettingsError("rebuild is for SQLite; restore a dump of PostgreSQL with pg_restore")
    rebuilt = copies.rebuild(settings.data_dir)
    remove_orphans(settings.data_dir, set())  # indexes are built again on demand
    print(f"kept {rebuilt.spans} spans and {rebuilt.vectors} vectors, lost {rebuilt.lost} spans")
    if rebuilt.damaged_file:
        print(
            f"the damaged database is {rebuilt.damaged_file}; it still contains text: delete it when it is not needed"
        )
