"""Faults while the service runs: a full disk, a damaged page, lost tables and privileges, a standby."""

import os
import pwd
import subprocess

import pytest

from ..reliability.test_disk import ROOT_ONLY, fill, page
from .test_errors import EXTENSION, database_after

DATABASE = "SELECT current_database()"


@pytest.fixture
def small_disk(killable):
    """Return the URL of a database on a tmpfs, and the path of a file that takes up space."""
    folder, nobody = killable.folder / "small", pwd.getpwnam("nobody").pw_uid
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size=16m,mode=700,uid={nobody}", "tmpfs", str(folder)], check=True)
    (folder / "space").mkdir()
    os.chown(folder / "space", nobody, -1)
    killable.sql(f"CREATE TABLESPACE small LOCATION '{folder / 'space'}'")
    url = killable.database()
    ((name,),) = killable.sql(DATABASE, url)
    killable.sql(f"ALTER DATABASE {name} SET TABLESPACE small")
    yield url, folder / "ballast"
    killable.sql(f"DROP DATABASE {name} WITH (FORCE)")
    killable.sql("DROP TABLESPACE small")
    subprocess.run(["umount", str(folder)], check=True)


@ROOT_ONLY
@pytest.mark.full
def test_a_full_disk_loses_nothing(small_disk, start_service):
    url, ballast = small_disk
    service = start_service(store=url, embedder="none")
    assert service.write("other", *map(page, range(1000, 1030))).status_code == 201
    ballast.write_bytes(bytes(2**20))
    written = fill(service, 0)
    ballast.unlink()
    written = fill(service, written)
    assert service.forget("other").status_code == 200
    assert service.write("s", page(written)).status_code == 201
    assert service.dump("s")["token_ranges"] == [[n, n + 1] for n in range(written + 1)]
    service.stop()


@pytest.mark.full
def test_a_damaged_page_affects_one_session(killable, start_service):
    url = killable.database()
    service = start_service(store=url, embedder="none")
    for name in ("whole", "damaged"):
        service.write(name, page(1), page(2))
    where = "SELECT pg_relation_filepath('mlx_tq_rescue.spans_' || id) FROM mlx_tq_rescue.sessions WHERE name = "
    ((path,),) = killable.sql(f"{where}'damaged'", url)
    killable.stop(keep=True)
    with (killable.data / path).open("rb+") as file:
        file.seek(5000)
        file.write(b"a cosmic ray")
    killable.start()
    for answer in (
        service.http.get("/evict/dump", params={"session_id": "damaged"}),
        service.write("damaged", page(3)),
    ):
        assert (answer.status_code, answer.json()["code"]) == (503, "store_damaged")
        assert "restore a dump" in answer.json()["detail"]
    assert service.dump("whole")["token_ranges"] == [[1, 2], [2, 3]]
    assert service.write("whole", page(3)).status_code == 201
    assert service.forget("damaged").status_code == 200
    service.stop()


def refused(service):
    """Return why a write is refused."""
    answer = service.write("s", page(9))
    assert (answer.status_code, answer.json()["code"]) == (503, "store_unavailable")
    assert service.http.get("/healthz").status_code == 200
    return answer.json()["detail"]


@pytest.mark.full
def test_lost_privileges_and_a_standby(postgres, start_service):
    statements = (EXTENSION, "CREATE ROLE clerk LOGIN", "GRANT CREATE ON DATABASE {} TO clerk")
    clerks = database_after(*statements, user="clerk")(postgres)
    url = clerks.replace("clerk@", "postgres@")
    ((name,),) = postgres.sql(DATABASE, url)
    service = start_service(store=clerks, embedder="none")
    service.write("s", page(1))
    end_connections = (
        f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}' AND pid <> pg_backend_pid()"
    )
    read_only = f"ALTER DATABASE {name} SET default_transaction_read_only ="
    privilege = "INSERT ON mlx_tq_rescue.queue"
    faults = (
        (f"{read_only} on", f"{read_only} off", None, "is read-only; name its primary in RESCUE_STORE"),
        (f"REVOKE {privilege} FROM clerk", f"GRANT {privilege} TO clerk", url, "a privilege (permission denied for"),
    )
    for number, (break_it, repair, where, says) in enumerate(faults, start=2):
        postgres.sql(break_it, where)
        postgres.sql(end_connections)
        assert says in refused(service)
        assert service.dump("s")["session_total"] == number - 1
        postgres.sql(repair, where)
        postgres.sql(end_connections)
        assert service.write("s", page(number)).status_code == 201


def test_lost_tables_are_created_at_the_next_start(postgres, start_service):
    url = postgres.database()
    service = start_service(store=url, embedder="none")
    service.write("s", page(1))
    postgres.sql("DROP SCHEMA mlx_tq_rescue CASCADE", url)
    assert "has lost tables" in refused(service)
    service.stop()
    service = start_service(store=url, embedder="none")
    assert service.write("s", page(1)).status_code == 201
