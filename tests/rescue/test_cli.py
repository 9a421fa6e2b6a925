"""The commands and the settings, as an operator meets them."""

import json
import os
import plistlib
import subprocess
import sys
from pathlib import Path

import pytest

from rescue_svc.errors import SettingsError
from rescue_svc.settings import Settings, load_settings

ROOT = Path(__file__).parents[2]


def run(*arguments, **environment):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RESCUE_")}
    command = [sys.executable, "-m", "rescue_svc.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=clean | environment, timeout=120, check=False)


def test_a_flag_wins_over_a_variable_over_the_file_over_the_default(tmp_path, monkeypatch):
    file = tmp_path / "rescue.toml"
    file.write_text("port = 1111\nmax_sessions = 11\nembedder = 'hashing'\n")
    monkeypatch.setenv("RESCUE_CONFIG", str(file))
    monkeypatch.setenv("RESCUE_PORT", "2222")
    monkeypatch.setenv("RESCUE_MAX_SESSIONS", "22")
    settings = load_settings(port="3333")
    assert (settings.port, settings.max_sessions, settings.embedder) == (3333, 22, "hashing")
    assert settings.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"port": "70000"}, "port"),
        ({"port": "http"}, "port"),
        ({"max_spans": "0"}, "max_spans"),
        ({"index": "annoy"}, "index"),
        ({"embed_idle_s": "-1"}, "embed_idle_s"),
        ({"token": "short"}, "token"),
        ({"no_such": "1"}, "no_such"),
        ({"host": "0.0.0.0"}, "can be reached from other machines and no token is set"),
    ],
)
def test_a_bad_setting_is_named(flags, says):
    with pytest.raises(SettingsError, match=says):
        load_settings(**flags)


def test_a_misspelt_variable_is_not_silently_dropped(monkeypatch):
    monkeypatch.setenv("RESCUE_PROT", "5054")
    with pytest.raises(SettingsError, match="RESCUE_PROT"):
        load_settings()


def test_a_missing_file_is_said(monkeypatch):
    monkeypatch.setenv("RESCUE_CONFIG", "/nowhere.toml")
    with pytest.raises(SettingsError, match="is not a file"):
        load_settings()


@pytest.mark.parametrize("content", [b"\xff\xfe", b"port = ["])
def test_a_file_that_is_no_toml_is_said(tmp_path, monkeypatch, content):
    (tmp_path / "rescue.toml").write_bytes(content)
    monkeypatch.setenv("RESCUE_CONFIG", str(tmp_path / "rescue.toml"))
    with pytest.raises(SettingsError, match="cannot be read"):
        load_settings()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_an_open_address_without_a_token_refuses_to_start(tmp_path, host):
    ended = run("serve", "--host", host, "--data-dir", tmp_path / "data")
    assert ended.returncode == 2
    assert "RESCUE_TOKEN" in ended.stderr
    assert not (tmp_path / "data").exists()


def test_wrong_usage(tmp_path):
    assert run().returncode == 2
    assert run("fly").returncode == 2
    assert run("serve", "--token", "secret-in-the-process-list").returncode == 2
    unknown = run("serve", "--embedder", "word2vec", "--data-dir", tmp_path / "data")
    assert unknown.returncode == 2
    assert "hashing" in unknown.stderr
    assert "Traceback" not in unknown.stderr


def test_a_port_in_use_is_said(serve, tmp_path):
    port = serve(embedder="none").url.rpartition(":")[2]
    ended = run("serve", "--port", port, "--data-dir", tmp_path / "other")
    assert ended.returncode == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in ended.stderr


def test_help_names_every_setting():
    said = run("serve", "--help").stdout
    for name, field in Settings.model_fields.items():
        assert ("--" + name.replace("_", "-") in said) == (name != "token")
        assert field.description


def test_doctor(serve, tmp_path):
    well = run("doctor", "--json", "--data-dir", tmp_path / "data", "--embedder", "hashing")
    assert well.returncode == 0
    assert {line["what"] for line in json.loads(well.stdout)} == {"python", "sqlite", "index", "embedder", "store"}
    server = serve(tmp_path / "data")
    assert "in use by a running service" in run("doctor", "--data-dir", tmp_path / "data", "--embedder", "none").stdout
    server.stop()
    database = tmp_path / "data" / "rescue.db"
    database.write_bytes(database.read_bytes()[:5000])
    ill = run("doctor", "--data-dir", tmp_path / "data", "--embedder", "none")
    assert ill.returncode == 1
    assert "BAD store" in ill.stdout


def test_sessions_and_forget_with_a_service_and_without(serve, tmp_path):
    server = serve(embedder="none", token="a-token-of-the-tests")
    server.write("a", ("a text", 0, 5), ("b text", 5, 9))
    server.write("b", ("other", 0, 5))
    where = ("--data-dir", server.data_dir, "--port", server.url.rpartition(":")[2])
    listed = json.loads(run("sessions", "--json", *where).stdout)
    assert {(s["session_id"], s["spans"]) for s in listed} == {("a", 2), ("b", 1)}
    assert "no service answers" in run("forget", "a", "--data-dir", server.data_dir, "--port", "1").stderr
    refused = run("forget", "a", *where)
    assert (refused.returncode, "token" in refused.stderr) == (1, True)
    forgotten = run("forget", "a", *where, RESCUE_TOKEN="a-token-of-the-tests")
    assert forgotten.stdout == "a: 2 spans forgotten\n"
    assert server.dump("a")["session_total"] == 0
    server.stop()
    assert run("forget", "b", *where).stdout == "b: 1 spans forgotten\n"
    again = run("forget", "b", *where)
    assert (again.returncode, "no session b" in again.stderr) == (1, True)
    assert b"other" not in (server.data_dir / "rescue.db").read_bytes()


def test_backup_and_rebuild(serve, tmp_path):
    server = serve()
    server.write("s", ("kept in the backup", 0, 5))
    server.wait_until_embedded()
    folder = tmp_path / "backups" / "monday"
    assert run("backup", folder, "--data-dir", server.data_dir).returncode == 0
    assert "exists" in run("backup", folder, "--data-dir", server.data_dir).stderr
    server.write("s", ("after the backup", 5, 9))
    busy = run("rebuild", "--data-dir", server.data_dir)
    assert (busy.returncode, "in use" in busy.stderr) == (1, True)
    server.wait_until_embedded()
    server.stop()
    assert run("rebuild", "--data-dir", server.data_dir).stdout == "kept 2 spans and 2 vectors, lost 0 spans\n"
    assert serve(folder, embedder="none").dump("s")["token_ranges"] == [[0, 5]]
    assert serve(embedder="none").dump("s")["token_ranges"] == [[0, 5], [5, 9]]
    missing = run("rebuild", "--data-dir", tmp_path / "nothing")
    assert (missing.returncode, "nothing holds no rescue.db" in missing.stderr) == (1, True)
    assert not (tmp_path / "nothing").exists()


def test_launchd():
    shown = run("install-launchd", "--print", "--data-dir", "/Users/me/Library/Application Support/mlx-tq-rescue")
    job = plistlib.loads(shown.stdout.encode())
    assert job["Label"] == "com.mlx-tq.rescue"
    assert job["ProgramArguments"][1] == "serve"
    assert job["KeepAlive"] == {"SuccessfulExit": False}
    sample = plistlib.loads((ROOT / "deploy" / "com.mlx-tq.rescue.plist").read_bytes())
    assert {**sample, "ProgramArguments": 0, "StandardErrorPath": 0} == {
        **job,
        "ProgramArguments": 0,
        "StandardErrorPath": 0,
    }
    assert sample["ProgramArguments"][1:] == job["ProgramArguments"][1:]


@pytest.mark.skipif(sys.platform == "darwin", reason="would install the job")
def test_launchd_elsewhere_says_what_to_do():
    ended = run("install-launchd")
    assert (ended.returncode, "macOS only" in ended.stderr) == (2, True)
