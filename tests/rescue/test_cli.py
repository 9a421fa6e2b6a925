"""Commands and settings."""

import json
import os
import plistlib
import subprocess
import sys
from pathlib import Path

import pytest

from rescue_svc.errors import SettingsError
from rescue_svc.settings import Settings, load_settings

from .harness import command

ROOT = Path(__file__).parents[2]
BAD_VALUES = [("port", "70000"), ("port", "http"), ("max_spans", "0"), ("index", "annoy"), ("embed_idle_s", "-1")]
BAD_VALUES += [("session_lifetime_s", "899")]
BAD_VALUES += [("token", "short"), ("no_such", "1")]


def test_a_flag_wins_over_a_variable_over_the_file_over_the_default(tmp_path, monkeypatch):
    file = tmp_path / "rescue.toml"
    file.write_text("port = 1111\nmax_sessions = 11\nembedder = 'hashing'\n")
    for name, value in {"CONFIG": str(file), "PORT": "2222", "MAX_SESSIONS": "22"}.items():
        monkeypatch.setenv(f"RESCUE_{name}", value)
    settings = load_settings(port="3333")
    assert (settings.port, settings.max_sessions, settings.embedder) == (3333, 22, "hashing")
    assert settings.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        *(({name: value}, name) for name, value in BAD_VALUES),
        *(({"host": host}, "can be reached .* no token is set") for host in ("0.0.0.0", "::", "192.0.2.1")),
    ],
)
def test_a_bad_setting_is_named(flags, says):
    with pytest.raises(SettingsError, match=says):
        load_settings(**flags)


@pytest.mark.parametrize(
    ("content", "says"), [(None, "is not a file"), (b"\xff\xfe", "cannot be read"), (b"port = [", "cannot be read")]
)
def test_a_bad_file_or_variable_is_named(tmp_path, monkeypatch, content, says):
    if content:
        (tmp_path / "rescue.toml").write_bytes(content)
    monkeypatch.setenv("RESCUE_CONFIG", str(tmp_path / "rescue.toml"))
    with pytest.raises(SettingsError, match=says):
        load_settings()
    monkeypatch.setenv("RESCUE_PROT", "5054")  # misspelled
    with pytest.raises(SettingsError, match="RESCUE_PROT"):
        load_settings()


def test_help_names_every_setting_and_wrong_usage_is_refused(tmp_path):
    open_to_all = ("serve", "--host", "::", "--data-dir", tmp_path / "data")
    for words in ((), ("fly",), ("serve", "--token", "secret-in-the-process-list"), open_to_all):
        assert command(*words).code == 2
    assert not (tmp_path / "data").exists()
    help_text = command("serve", "--help").out
    for name, field in Settings.model_fields.items():
        assert ("--" + name.replace("_", "-") in help_text) == (name not in ("token", "store"))
        assert field.description


@pytest.fixture
def homeless(monkeypatch):
    """Run as a user whom the system does not know."""
    for name in ("HOME", "XDG_DATA_HOME", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # raises KeyError


@pytest.mark.parametrize(
    "words",
    [
        *(("serve",), ("doctor",), ("sessions",), ("forget", "a"), ("backup", "x"), ("rebuild",)),
        ("install-launchd", "--print", "--data-dir", "data"),
    ],
)
def test_a_user_without_a_home_is_one_line(homeless, words):
    done = command(*words)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.err.startswith("mlx-tq-rescue: HOME is not set")


@pytest.mark.full
def test_no_home_is_needed_with_a_data_dir(homeless, start_service, tmp_path):
    where = ("--data-dir", tmp_path / "data")
    assert command("doctor", *where).code == 0
    assert start_service(embedder="auto").write("s", ("a text", 0, 5)).status_code == 201
    assert "1 spans" in command("sessions", *where).out
    assert command("backup", tmp_path / "copy", *where).code == 0
    unknown = command("doctor", *where, "--embedder", "sentence-transformers:~nobody-here/model")
    assert ("Traceback" in unknown.err, "~nobody-here/model" in unknown.out) == (False, True)


def test_an_ephemeral_service_needs_a_temporary_folder():
    line = [sys.executable, "-m", "rescue_svc", "serve", "--ephemeral", "true", "--port", "0"]
    environment = os.environ | {"TMPDIR": "/no/such/folder"}
    done = subprocess.run(line, stdin=subprocess.PIPE, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, "cannot be written to /no/such/folder" in done.stderr) == (2, True)


def test_doctor(start_service, tmp_path):
    where = ("--data-dir", tmp_path / "data")
    healthy = command("doctor", "--json", *where, "--embedder", "hashing")
    assert healthy.code == 0
    assert {line["what"] for line in json.loads(healthy.out)} == {"python", "sqlite", "index", "embedder", "store"}
    service = start_service(embedder="none")
    assert "in use by a running service" in command("doctor", *where, "--embedder", "none").out
    service.stop()
    assert "0 sessions, 0 spans, all intact" in command("doctor", *where, "--embedder", "none").out
    database = tmp_path / "data" / "rescue.db"
    database.write_bytes(database.read_bytes()[:5000])
    damaged = command("doctor", *where, "--embedder", "none")
    assert (damaged.code, "BAD store" in damaged.out) == (1, True)


def test_backup_rebuild_and_forget(start_service, tmp_path):
    for words in (("rebuild",), ("sessions",), ("backup", "elsewhere")):
        missing = command(*words, "--data-dir", tmp_path / "nothing")
        assert (missing.code, "nothing has no rescue.db" in missing.err) == (1, True)
        assert not (tmp_path / "nothing").exists()
    service = start_service()
    where = ("--data-dir", service.data_dir)
    service.write_and_embed("s", ("kept in the backup", 0, 5))
    folder = tmp_path / "backups" / "monday"
    assert command("backup", folder, *where).code == 0
    assert "exists" in command("backup", folder, *where).err
    service.write("s", ("after the backup", 5, 9))
    body = {"session_id": "t", "chunks": [{"text": "a text", "token_range": [0, 2]}], "temporary": True}
    service.http.post("/evict/write", json=body)
    expires = service.sessions()["t"]["expires"]
    busy = command("rebuild", *where)
    assert (busy.code, "in use" in busy.err) == (1, True)
    assert "no service of yours answers" in command("forget", "s", *where).err  # it has no socket
    service.wait_until_embedded()
    service.stop()
    assert command("rebuild", *where).out == "kept 3 spans and 3 vectors, lost 0 spans\n"
    assert start_service(folder, embedder="none").dump("s")["token_ranges"] == [[0, 5]]
    again = start_service(embedder="none")
    assert again.dump("s")["token_ranges"] == [[0, 5], [5, 9]]
    assert again.sessions()["t"]["expires"] == expires
    again.stop()
    assert command("forget", "s", *where).out == "s: 2 spans deleted\n"
    unknown = command("forget", "s", *where)
    assert (unknown.code, "no session s" in unknown.err) == (1, True)
    database = service.data_dir / "rescue.db"
    assert b"kept in" not in database.read_bytes()
    database.write_bytes(b"no database" * 1000)
    failed = command("backup", folder.with_name("tuesday"), *where)
    assert (failed.code, "damaged" in failed.err) == (1, True)
    assert list(folder.parent.iterdir()) == [folder]


def test_launchd():
    shown = command("install-launchd", "--print", "--data-dir", "/Users/me/Library/Application Support/mlx-tq-rescue")
    job = plistlib.loads(shown.out.encode())
    sample = plistlib.loads((ROOT / "deploy" / "com.mlx-tq.rescue.plist").read_bytes())
    assert sample["ProgramArguments"][1:] == job["ProgramArguments"][1:]
    of_this_machine = {"ProgramArguments": 0, "StandardErrorPath": 0}
    assert sample | of_this_machine == job | of_this_machine
    if sys.platform != "darwin":  # where it would install the job
        refused = command("install-launchd")
        assert (refused.code, "macOS only" in refused.err) == (2, True)
