"""The store in the commands: the same answer from what an earlier run read; `mlx_tq.store` shows, checks, empties."""

import json

import pytest

from mlx_tq import __main__

from .tools import facts

PROMPT = "".join(facts(40))


def run(capsys, *words):
    code = __main__.main([*map(str, words)])
    said = capsys.readouterr()
    return code, said.out, said.err


def generate(capsys, *words):
    step = ("--prefill-step-size", "256", "-m", "6", "--json", "--dtype", "float32")
    code, out, _ = run(capsys, "generate", "-p", PROMPT, *step, *words)
    assert code == 0
    return json.loads(out)


def test_a_second_run_goes_on_from_the_first(tmp_path, capsys):
    store = ("--prefix-cache", tmp_path / "store", "--prefix-cache-limit", "1GB")
    plain, first, second = generate(capsys), generate(capsys, *store), generate(capsys, *store)
    assert plain["text"] == first["text"] == second["text"]
    assert [found["stats"]["cached_tokens"] for found in (plain, first)] == [0, 0]
    assert second["stats"]["cached_tokens"] == second["stats"]["prompt_tokens"] - 1
    code, out, _ = run(capsys, "store", "list", "--prefix-cache", tmp_path / "store", "--json")
    held = json.loads(out)
    assert code == 0
    assert max(point["tokens"] for point in held["points"]) == second["stats"]["cached_tokens"]
    assert held["blocks"] > 0
    records = held["blocks"] + len(held["points"])
    code, out, _ = run(capsys, "store", "check", "--prefix-cache", tmp_path / "store")
    assert (code, out) == (0, f"records: {records}, damaged and removed: 0\n")
    assert run(capsys, "store", "list", "--prefix-cache", tmp_path / "store")[1].count("\n") > len(held["points"])
    assert (
        run(capsys, "store", "clear", "--prefix-cache", tmp_path / "store", "--json")[1]
        == json.dumps({"bytes_removed": held["nbytes"]}) + "\n"
    )
    assert generate(capsys, *store)["stats"]["cached_tokens"] == 0


@pytest.mark.parametrize("other", [("--kv-profile", "off"), ("--draft-model", "x"), ("--kv-bits", "8")])
def test_what_cannot_be_stored_is_said(tmp_path, capsys, other):
    code, _, err = run(capsys, "generate", "-p", "a", "--prefix-cache", tmp_path / "s", *other)
    assert code == 2
    assert "--prefix-cache cannot be combined with" in err


def test_a_limit_needs_a_store(monkeypatch, capsys):
    assert "add --prefix-cache auto" in run(capsys, "generate", "-p", "a", "--prefix-cache-limit", "1GB")[2]
    monkeypatch.setenv("MLX_TQ_PREFIX_CACHE_LIMIT", "much")
    assert "MLX_TQ_PREFIX_CACHE_LIMIT: 'much' is not a size" in run(capsys, "generate", "-p", "a")[2]


@pytest.mark.parametrize("action", ["list", "check", "clear"])
def test_a_folder_that_is_not_there_is_not_made(tmp_path, capsys, action):
    code, out, said = run(capsys, "store", action, "--prefix-cache", tmp_path / "typo")
    assert (code, out) == (2, "")
    assert "typo is no folder; name that of a store, or auto" in said
    assert not (tmp_path / "typo").exists()
