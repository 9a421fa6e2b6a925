"""A second run reuses the prefix cache and answers the same; `mlx_tq.store` lists, checks and clears it."""

import json
import shutil

import pytest

from mlx_tq.prefix_cache.folder import CHECKPOINTS, Folder

from .tools import facts, refused

PROMPT = "".join(facts(40))


@pytest.mark.full
def test_a_second_run_reuses_the_first(quick, tmp_path):
    folder = ("--prefix-cache", tmp_path / "store")

    def generate(*words):
        return quick("generate", "-p", PROMPT, "--prefill-step-size", 256, "-m", 6, "--json", *words).json

    plain, first, second = generate(), *(generate(*folder, "--prefix-cache-limit", "1GB") for _ in range(2))
    assert plain["text"] == first["text"] == second["text"]
    assert [answer["stats"]["cached_tokens"] for answer in (plain, first)] == [0, 0]
    assert second["stats"]["cached_tokens"] == second["stats"]["prompt_tokens"] - 1
    listed = quick("store", "list", *folder, "--json").json
    assert max(checkpoint["tokens"] for checkpoint in listed["checkpoints"]) == second["stats"]["cached_tokens"]
    assert listed["blocks"] > 0
    records = listed["blocks"] + len(listed["checkpoints"])
    assert quick("store", "check", *folder) == (0, f"entries: {records}, damaged and removed: 0\n", "")
    assert quick("store", "list", *folder).out.count("\n") > len(listed["checkpoints"])
    shutil.copytree(tmp_path / "store", tmp_path / "store" / "rank-0-of-2")  # the part of one of several processes
    both = quick("store", "list", *folder, "--json").json
    assert both["blocks"] == 2 * listed["blocks"]
    assert quick("store", "check", *folder).out == f"entries: {2 * records}, damaged and removed: 0\n"
    assert quick("store", "clear", *folder, "--json").out == json.dumps({"bytes_removed": both["nbytes"]}) + "\n"
    assert quick("store", "list", *folder, "--json").json["nbytes"] == 0
    assert generate(*folder)["stats"]["cached_tokens"] == 0


@pytest.mark.parametrize("action", ["list", "check", "clear"])
def test_a_folder_that_only_looks_like_a_prefix_cache(cli, tmp_path, action):
    for name in ("blocks", "checkpoints"):
        (tmp_path / name).mkdir()
    survey = tmp_path / "checkpoints" / "survey.csv"
    survey.write_text("x")
    tmp_path.chmod(0o755)
    refused(cli("store", action, "--prefix-cache", tmp_path), "it holds other files (blocks). Name an empty or a new")
    assert survey.read_text() == "x"
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_a_checkpoint_that_was_forged_counts_and_is_not_listed(cli, tmp_path):
    folder = Folder(tmp_path)
    with folder.writing():
        folder.write(CHECKPOINTS, "0" * 64, b"forged")
    words = ("--prefix-cache", tmp_path, "--json")
    listed = json.loads(cli("store", "list", *words).out)
    assert (listed["nbytes"] > 0, listed["checkpoints"]) == (True, [])
    assert cli("store", "clear", *words).code == 0
    assert json.loads(cli("store", "list", *words).out)["nbytes"] == 0
