"""Delete a session for good, also while the service runs."""

# ruff: noqa: T201 - prints the output of a command

import json
import urllib.error
import urllib.request

from rescue_svc.errors import DirectoryInUseError, SessionNotFoundError, StoreUnavailableError
from rescue_svc.opening import open_all
from rescue_svc.settings import Settings


def run(settings: Settings, session: str) -> None:
    try:
        spans = _forget_in_store(settings, session)
    except DirectoryInUseError:
        spans = _forget_by_service(settings, session)
    print(f"{session}: {spans} spans forgotten")


def _forget_in_store(settings: Settings, session: str) -> int:
    store, index = open_all(settings)
    try:
        forgotten = store.forget(session)
        index.forget(forgotten.id)
    finally:
        store.close()
    return forgotten.spans


def _forget_by_service(settings: Settings, session: str) -> int:
    request = urllib.request.Request(f"http://{settings.host}:{settings.port}/sessions/{session}", method="DELETE")
    if settings.token:
        request.add_header("Authorization", f"Bearer {settings.token.get_secret_value()}")
    try:
        with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310
            return int(json.load(response)["forgotten"])
    except urllib.error.HTTPError as error:
        detail = json.load(error)["detail"]
        raise (SessionNotFoundError if error.code == 404 else StoreUnavailableError)(detail) from error
    except (OSError, ValueError) as error:
        raise StoreUnavailableError(
            f"{settings.data_dir} is in use, but no service answers on {settings.host}:{settings.port}; give its --port"
        ) from error
