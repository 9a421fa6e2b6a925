"""Commands of several ranks print what one process prints, with eviction, recall and rescue."""

import json
import re

import pytest
from cli.tools import facts, refused, zoo_model
from smollm2 import PATH, WHY, needs_smollm2

from mlx_tq.config import BLOCK
from mlx_tq.prefix_cache.folder import CHECKPOINTS, Folder

from .together import command

# A small window, so that a text of a page is mostly packed, and much of it leaves.
PREFIX, WINDOW = 16, 32
PACKED = ("--dtype", "float32", "--kv-sinks", PREFIX, "--kv-window", WINDOW)
BYTES = object()  # of BUDGETS: so many that tokens leave
WAYS = {
    "balanced": (),
    "evict": ("--kv-evict", "triattention:trigger=32:warmup=64:calibration=text", "--kv-budget", "50%"),
    "known": ("--kv-evict", "triattention:trigger=32", "--kv-budget", "150"),
    "recall": ("--kv-evict", "knorm:trigger=32", "--kv-budget", "150", "--kv-recall", "96"),
    "heads": ("--kv-evict", "heads", "--kv-budget", "60%@600", "--kv-recall", "off"),
    "bytes": ("--kv-evict", "expected_attention:trigger=32:warmup=64:calibration=text", "--kv-budget", BYTES),
}
# Ranks that divide the KV heads of a model: its own two, its own three, four of tiny ones.
MODELS = {"needle": 2, "smollm2": 3, "llama": 4, "qwen2": 4, "qwen3": 4}
BUDGETS = {"needle": "3MB", "llama": "1.1MB", "qwen2": "550KB", "qwen3": "2.4MB"}


def generate(folder, size, model, *words):
    """Run generate, and return the results of all ranks and the report of the first."""
    text, question = facts(24 if model == "smollm2" else 60)
    prompt = folder.parent / "prompt.txt"
    prompt.write_text(f"{text}\n{question}")
    named = () if model is None else ("--model", model)
    asked = ("--prompt-file", prompt, "--json", "--max-tokens", "24")
    done = command(folder, size, "generate", *named, *asked, *PACKED, *words)
    assert [each.code for each in done] == [0] * size, [each.err for each in done]
    return done, json.loads(done[0].out)


def chosen(name, folder):
    if name == "smollm2" and PATH is None:
        pytest.skip(WHY)
    if name in ("needle", "smollm2"):
        return {"needle": None}.get(name, name)
    return zoo_model(folder / name, name, num_attention_heads=8, num_key_value_heads=4, hidden_size=256)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "way"),
    [
        (name, way)
        for name in MODELS
        for way in WAYS
        if (name, way) != ("smollm2", "bytes")  # the least that can be asked for is more than its short prompt takes
    ],
)
def test_ranks_print_what_one_process_prints(name, way, tmp_path):
    size, model = MODELS[name], chosen(name, tmp_path)
    words = [BUDGETS[name] if word is BYTES else word for word in WAYS[way]]
    _, alone = generate(tmp_path / "alone", 1, model, *words)
    done, together = generate(tmp_path / "together", size, model, *words)
    assert together["text"] == alone["text"]
    assert [each.out for each in done[1:]] == [""] * (size - 1)
    assert "Traceback" not in "".join(each.err for each in done)
    whole, parts = alone["stats"]["cache"], together["ranks"]
    assert [part["rank"] for part in parts] == list(range(size))
    assert [part["evicted"] for part in parts] == [whole["evicted"]] * size
    assert (whole["evicted"] > 0) == (way != "balanced")
    assert [size * part["native_nbytes"] for part in parts] == [whole["native_nbytes"]] * size
    evicted = whole["evicted"]
    packed = (whole["tokens"] - WINDOW) // BLOCK * BLOCK - PREFIX - evicted
    # What no head has: counts of clamped vectors, and behind gaps which mean each packed row has.
    shared = len(alone["plan"]["layers"]) * (2 * 4 + (4 * packed if evicted else 0))
    nbytes = [part["nbytes"] - shared for part in parts]
    if way == "heads":  # of which a rank may have more that keep all rows
        assert sum(nbytes) == pytest.approx(whole["nbytes"] - shared, abs=size * shared)
    else:
        assert [size * each for each in nbytes] == [whole["nbytes"] - shared] * size
    if way == "recall":
        assert together["recalled"]["positions"] == alone["recalled"]["positions"] != []


@pytest.mark.full
def test_a_chat_of_ranks_is_one_of_one_process(tmp_path):
    """Only the first rank calls the rescue service."""
    lines = ["The access code is 417295.", facts(40, key=0)[0], "What is the access code?"]
    words = ("--max-tokens", "12", *PACKED, "--kv-evict", "recency", "--kv-budget", "200")
    words = (*words, "--kv-recall", "off", "--rescue-timeout", "60")
    alone_input, together_input = ("\n".join([*lines, *more, "/stats", "/quit\n"]) for more in ([], ["/save x"]))
    (alone,) = command(tmp_path / "alone", 1, "chat", *words, said=alone_input)
    first, second = command(tmp_path / "together", 2, "chat", *words, said=together_input)
    assert (alone.code, first.code, second.code) == (0, 0, 0), (first.err, second.err)
    assert "417295" in first.out
    assert first.out.splitlines()[:3] == alone.out.splitlines()[:3]
    assert re.search(r"Quoted \d+ tokens of evicted text", first.err)
    assert "/save is for one process: each of 2 ranks has a part of the cache." in first.err
    assert (second.out, second.err) == ("", "")


@pytest.mark.full
def test_a_cached_prefix_is_restored_as_far_as_all_ranks_have_it(tmp_path):
    words = ("--prefill-step-size", "64", *WAYS["recall"])
    _, plain = generate(tmp_path / "plain", 2, None, *words)
    words += ("--prefix-cache", tmp_path / "store")
    reports = [generate(tmp_path / "first", 2, None, *words)[1], generate(tmp_path / "again", 2, None, *words)[1]]
    folders = [Folder(tmp_path / "store" / f"rank-{rank}-of-2") for rank in range(2)]
    assert Folder(tmp_path / "store").records() == [], "one process can use the same folder"
    stops = []
    for folder in folders:
        tokens = {len(summary.tokens): key for key, summary in folder.checkpoints().items()}
        stops.append(dict(sorted(tokens.items())))
    assert list(stops[0]) == list(stops[1])
    last, before = sorted(stops[0], reverse=True)[:2]
    path = folders[1].path / CHECKPOINTS / stops[1][last]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    reports.append(generate(tmp_path / "damaged", 2, None, *words)[1])
    reports.append(generate(tmp_path / "mended", 2, None, *words)[1])
    folders[0].remove(CHECKPOINTS, stops[0][last])
    reports.append(generate(tmp_path / "removed", 2, None, *words)[1])
    assert [each["stats"]["cached_tokens"] for each in reports] == [0, last, before, last, before]
    for name in ("text", "recalled"):  # ranks that choose alone, each by its own heads, recall other blocks
        found = [each[name] if name == "text" else each[name]["positions"] for each in (plain, *reports)]
        assert all(each == found[0] for each in found)
    assert all(each["stats"]["cache"]["evicted"] == plain["stats"]["cache"]["evicted"] > 0 for each in reports)


@pytest.mark.full
@pytest.mark.parametrize(("name", "why"), [("phi3", "does not divide it"), ("qwen3_next", "divides it only by layers")])
def test_a_model_that_mlx_lm_does_not_divide_by_heads_is_refused_by_name(name, why, tmp_path):
    model = zoo_model(tmp_path / "model", name, num_attention_heads=4, num_key_value_heads=2)
    for rank, each in enumerate(command(tmp_path / "together", 2, "generate", "--model", model, "-p", "x")):
        line = f"mlx_tq generate: rank {rank}: {name} cannot run on 2 ranks: mlx-lm {why}"
        assert (each.code, line in each.err) == (1, True), each.err


@pytest.mark.full
@pytest.mark.parametrize(
    ("size", "words", "says"),
    [
        (
            3,
            ["generate", "-p", "x"],
            "needle (qwen3): cannot split 2 KV heads across 3 ranks. Use mlx.launch -n 1 or 2.",
        ),
        pytest.param(
            2,
            ["generate", "-p", "x", "--model", "smollm2"],
            "(llama): cannot split 3 KV heads across 2 ranks. Use mlx.launch -n 1",
            marks=needs_smollm2,
        ),
        (
            2,
            ["generate", "-p", "x", "--kv-shadow", "64"],
            "--kv-shadow needs a single process, and 2 ranks were started.",
        ),
        (
            2,
            ["server", "--pipeline"],
            "--pipeline is not supported: mlx_tq divides a model by its heads, not its layers",
        ),
        (2, ["server", "--model", "x", "--model", "y"], "2 models need a single process, and 2 ranks were started."),
        (2, ["chat", "--load", "x"], "--load needs a single process, and 2 ranks were started. Drop one of the two."),
        (
            2,
            ["evaluate", "needle"],
            "evaluate runs in one process; only generate, chat and server can run under mlx.launch.",
        ),
    ],
)
def test_features_that_do_not_support_ranks_are_refused(size, words, says, tmp_path):
    for rank, each in enumerate(command(tmp_path / "together", size, *words)):
        assert f": rank {rank}: " in refused(each, says)
