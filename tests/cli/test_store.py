"""A second run reuses the prefix cache and answers the same; `mlx_tq.store` lists, checks and clears it."""

import json

from .tools import facts

PROMPT = "".join(facts(40))


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
    assert quick("store", "check", *folder) == (0, f"records: {records}, damaged and removed: 0\n", "")
    assert quick("store", "list", *folder).out.count("\n") > len(listed["checkpoints"])
    assert quick("store", "clear", *folder, "--json").out == json.dumps({"bytes_removed": listed["nbytes"]}) + "\n"
    assert generate(*folder)["stats"]["cached_tokens"] == 0
