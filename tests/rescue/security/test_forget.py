"""DELETE leaves no byte of the text: not in the database, its log or the index, and not in what is renamed aside."""

import random
import shutil

from rescue_svc.embed.hashing import HashingEmbedder
from rescue_svc.store import words
from rescue_svc.store.files import connect

SECRET = "Xylophonquartz"  # a word that nothing else on the disk holds
WORDS = SECRET.lower().encode()


def traces(folder):
    """Every file that holds the secret, in any case, or the vector of a text."""
    vector = HashingEmbedder().embed([f"the {SECRET} number 5 is 5"])[0].tobytes()[:64]
    found = []
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            if WORDS in content.lower() or vector in content:
                found.append(path.name)
    return found


def secrets(count):
    return [(f"the {SECRET} number {n} is {n}", 3 * n, 3 * n + 2) for n in range(count)]


def test_nothing_is_left(serve):
    server = serve()
    server.write("kept", ("an innocent text", 0, 5))
    for first in range(0, 1000, 200):
        server.write("secret", *secrets(1000)[first : first + 200])
    server.wait_until_embedded()
    assert server.retrieve("secret", SECRET)["chunks"]
    server.client.post("/sessions/secret/hibernate")
    (server.data_dir / "index" / "2.index.bad-1").write_bytes(WORDS)  # as if a damaged one had been renamed
    assert len(traces(server.data_dir)) >= 3  # the database or its log, the index, the file aside: the search works
    assert server.client.delete("/sessions/secret").json()["forgotten"] == 1000
    assert traces(server.data_dir) == []
    assert server.retrieve("kept", "innocent")["chunks"]
    server.stop()
    assert traces(server.data_dir) == []


def test_nothing_is_left_when_others_write_and_ask_meanwhile(serve, scale):
    server = serve()
    for round_number in range(10 * scale):
        server.write("secret", *secrets(random.randint(1, 256)))
        server.write(f"other-{round_number}", ("an innocent text", 0, 5))
        if random.random() < 0.5:
            server.wait_until_embedded()
        server.retrieve("secret", SECRET)
        assert server.client.delete("/sessions/secret").status_code == 200
        assert traces(server.data_dir) == []
    server.kill()
    assert traces(server.data_dir) == []


def test_nothing_is_left_after_a_crash_before_it(serve):
    server = serve()
    server.write("secret", *secrets(100))
    server.wait_until_embedded()
    server.kill()
    server = serve(embedder="none")
    assert traces(server.data_dir)
    server.client.delete("/sessions/secret")
    assert traces(server.data_dir) == []


def test_a_crash_in_the_middle_of_forgetting_is_made_good(serve):
    """Committed, but the log not emptied and the index not removed: the next start does both."""
    server = serve()
    server.write("secret", *secrets(100))
    server.wait_until_embedded()
    server.retrieve("secret", SECRET)
    server.client.post("/sessions/secret/hibernate")
    server.kill()
    connection = connect(server.data_dir / "rescue.db")
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    reader = connect(server.data_dir / "rescue.db")  # keeps the log from being emptied at the end
    connection.execute("BEGIN")
    words.drop(connection, 1)
    connection.execute("DELETE FROM sessions")
    connection.execute("COMMIT")
    copy = server.data_dir.with_name("copy")
    shutil.copytree(server.data_dir, copy)
    connection.close()
    reader.close()
    assert len(traces(copy)) >= 2
    server = serve(copy)
    assert traces(copy) == []
    assert server.client.get("/sessions").json() == {"sessions": []}


def test_ids_are_never_used_again(serve):
    """What belongs to a forgotten session cannot come to belong to the next one."""
    server = serve()
    for _ in range(3):
        server.write("s", *secrets(2))
        server.wait_until_embedded()
        server.client.post("/sessions/s/resume")
        server.client.post("/sessions/s/hibernate")
        (index,) = server.data_dir.glob("index/*.index")
        assert server.client.delete("/sessions/s").status_code == 200
        server.write("t", ("a new text", 0, 5))
        server.wait_until_embedded()
        server.client.post("/sessions/t/resume")
        server.client.post("/sessions/t/hibernate")
        (new,) = server.data_dir.glob("index/*.index")
        assert new.name != index.name
        server.client.delete("/sessions/t")
