"""kill -9 of a service, and of the whole server, while they write: what was acknowledged is there."""

import random

import pytest
from http_harness import wait_for

from mlx_tq.rescue import RescueClient, TextSpan, open_service

from ..harness import Server
from ..reliability.test_kill import Writer, kept

ROUNDS = pytest.mark.parametrize("rounds", [1, pytest.param(50, marks=pytest.mark.full)])


class Undaunted(Writer):
    """Ends where the store is away, too."""

    last = (503,)


@pytest.fixture(scope="module")
def store(own):
    return own.database()


@pytest.fixture(scope="module")
def survivor(tmp_path_factory, store):
    """A service that no test kills. It embeds few at a time, so that others have their share."""
    server = Server(tmp_path_factory.mktemp("survivor") / "data", store=store, embed_batch=4)
    yield server
    assert server.stop() == 0
    assert "Traceback" not in server.log()


def check(server, writers):
    """All that was acknowledged is there, and nothing that was not sent; each has its vector."""
    for writer in writers:
        assert writer.acknowledged <= kept(server, writer.session) <= writer.sent
    server.wait_until_embedded()
    for name, session in server.sessions().items():
        assert session["embedded"] == session["session_total"] == server.resume(name)["vectors"]


def writing(services, name):
    """A writer for each service, which have begun."""
    writers = [Undaunted(service, f"{name}-{place}", 0) for place, service in enumerate(services)]
    for writer in writers:
        writer.start()
    wait_for(lambda: all(writer.acknowledged for writer in writers))
    writers[0].join(random.uniform(0, 0.1))
    return writers


@ROUNDS
def test_kill_of_a_service_while_it_and_another_write(survivor, store, serve, rounds):
    """The other goes on, and embeds what the one that is gone had taken."""
    writers = []
    for number in range(rounds):
        service = serve(store=store, embed_batch=4)
        pair = writing([service, survivor], f"service-{rounds}-{number}")
        service.kill()
        pair[0].join()
        before = len(pair[1].acknowledged)
        wait_for(lambda: len(pair[1].acknowledged) > before)  # noqa: B023 - called at once
        pair[1].stopping = True
        pair[1].join()
        writers += pair
    check(survivor, writers)


@ROUNDS
def test_kill_of_the_server_while_two_services_write(own, survivor, store, here, rounds):
    services = [survivor, here(store=store, embedder="none")]
    writers = []
    for number in range(rounds):
        pair = writing(services, f"server-{rounds}-{number}")
        own.kill()
        for writer in pair:
            writer.join()
        own.start()
        writers += pair
    check(survivor, writers)
    assert sum(len(writer.acknowledged) for writer in writers) > 2 * rounds


def test_a_server_that_is_away_is_said_and_comes_back(own, survivor):
    """Health is answered, all else says why not; mlx_tq goes on without, and finds again when it is back."""
    client = RescueClient(open_service(survivor.url))
    client.write("away", [TextSpan(0, 4, "the access code is 417295")])
    client.flush(30)
    found = client.retrieve("away", "access code", timeout=30)
    assert [span.text for span in found] == ["the access code is 417295"]
    survivor.wait_until_embedded()
    own.kill()
    for call in (lambda: survivor.write("away", ("another", 5, 9)), lambda: survivor.http.get("/readyz")):
        answer = call()
        assert (answer.status_code, answer.json()["code"]) == (503, "store_unavailable")
        assert "no connection to postgresql://" in answer.json()["detail"]
    assert survivor.http.get("/healthz").status_code == 200
    assert client.retrieve("away", "access code", timeout=30) == []
    assert "Generation continues without" in client.take_warning()
    own.start()
    wait_for(lambda: survivor.http.get("/readyz").status_code == 200)
    assert survivor.write("away", ("written when it was back", 5, 9)).status_code == 201
    survivor.wait_until_embedded()
    wait_for(lambda: client.retrieve("away", "access code", timeout=30))
    client.close()
    # Connections that the server ended are noticed before they are used.
    own.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'mlx-tq-rescue'")
    assert survivor.found("away", "written")[0] == "written when it was back"
