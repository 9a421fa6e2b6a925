"""Opens the store and the index that the settings name."""

from collections.abc import Callable

from rescue_svc.errors import SettingsError
from rescue_svc.index import Residents, remove_snapshots
from rescue_svc.settings import Settings
from rescue_svc.store import Index, SqliteStore, Store


def open_all(settings: Settings, model: str = "", dim: Callable[[], int] = int) -> tuple[Store, Index]:
    """Return the store, and the index over its vectors [N, D] of `model`; `dim` returns D when it is needed."""
    if settings.store is not None:
        try:
            from rescue_svc import postgres  # psycopg, which only its users have
        except ImportError as error:
            raise SettingsError("a store on PostgreSQL needs psycopg: `pip install 'mlx-tq[postgres]'`") from error
        connections = postgres.Connections(settings.store.get_secret_value())
        shared = postgres.PostgresStore(connections, settings.caps(), hnsw=settings.index != "exact")
        return shared, postgres.PostgresIndex(connections, model, "exact" if settings.index == "exact" else "hnsw")
    store = SqliteStore(settings.data_dir, settings.caps())
    try:
        # A crash may have interrupted `forget` before it deleted the snapshot.
        remove_snapshots(settings.data_dir, keep={session.id for session in store.sessions()})
    except BaseException:
        store.close()
        raise
    return store, Residents(store, model, dim, settings.max_index_mb * 2**20)
