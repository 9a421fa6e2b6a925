"""kill -9 of a service, and of the PostgreSQL server, while services write: acknowledged spans are stored."""

import pytest
from http_harness import wait_for

from mlx_tq.rescue import RescueClient, TextSpan, open_service

from ..harness import Server
from ..reliability.test_kill import check_index, check_spans, start_writers

ROUNDS = pytest.mark.parametrize("rounds", [1, pytest.param(50, marks=pytest.mark.full)])


@pytest.fixture(scope="module")
def store(killable):
    return killable.database()


@pytest.fixture(scope="module")
def survivor(tmp_path_factory, store):
    """Run a service that no test kills. It embeds few spans at a time, so that others embed some."""
    server = Server(tmp_path_factory.mktemp("survivor") / "data", store=store, embed_batch=4)
    yield server
    assert server.stop() == 0
    assert "Traceback" not in server.log()


@ROUNDS
def test_kill_of_a_service_while_it_and_another_write(survivor, store, start_server, rounds):
    """The other service embeds the spans that the killed one had claimed."""
    writers = []
    for number in range(rounds):
        service = start_server(store=store, embed_batch=4)
        killed, other = pair = start_writers([service, survivor], f"service-{rounds}-{number}", (503,))
        service.kill()
        killed.join()
        before = len(other.acknowledged)
        wait_for(lambda other=other, before=before: len(other.acknowledged) > before)
        other.stopping = True
        other.join()
        writers += pair
    check_spans(survivor, writers)
    check_index(survivor)


@pytest.mark.full
@ROUNDS
def test_kill_of_the_server_while_two_services_write(killable, survivor, store, start_service, rounds):
    services = [survivor, start_service(store=store, embedder="none")]
    writers = []
    for number in range(rounds):
        pair = start_writers(services, f"server-{rounds}-{number}", (503,))
        killable.kill()
        for writer in pair:
            writer.join()
        killable.start()
        writers += pair
    check_spans(survivor, writers)
    check_index(survivor)
    assert sum(len(writer.acknowledged) for writer in writers) > 2 * rounds


@pytest.mark.full
def test_the_server_stops_and_returns(killable, survivor):
    """The service answers /healthz, and the client continues without retrieval until the server is back."""
    client = RescueClient(open_service(survivor.url))
    client.write("away", [TextSpan(0, 4, "the access code is 417295")])
    client.flush(30)
    results = client.retrieve("away", "access code", timeout=30)
    assert [span.text for span in results] == ["the access code is 417295"]
    survivor.wait_until_embedded()
    killable.kill()
    for call in (lambda: survivor.write("away", ("another", 5, 9)), lambda: survivor.http.get("/readyz")):
        answer = call()
        assert (answer.status_code, answer.json()["code"]) == (503, "store_unavailable")
        assert "no connection to postgresql://" in answer.json()["detail"]
    assert survivor.http.get("/healthz").status_code == 200
    assert client.retrieve("away", "access code", timeout=30) == []
    assert "Generation continues without" in client.take_warning()
    killable.start()
    wait_for(lambda: survivor.http.get("/readyz").status_code == 200)
    assert survivor.write("away", ("written later", 5, 9)).status_code == 201
    survivor.wait_until_embedded()
    wait_for(lambda: client.retrieve("away", "access code", timeout=30))
    client.close()
    # Connections that the server closed are not used.
    killable.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'mlx-tq-rescue'")
    assert survivor.search("away", "written")[0] == "written later"
