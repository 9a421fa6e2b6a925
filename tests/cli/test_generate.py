"""What goes where: the answer to stdout, the rest to stderr; the plan before, the statistics after."""

import json
import re

import mlx_lm
import pytest
from rescue.harness import Server

import mlx_tq
from mlx_tq.config import KVConfig

from .tools import EMBEDDED, PACKED, facts, float32_model, refused, zoo_model

TEXT, QUESTION = facts(24)
ASK = ("generate", "-p", TEXT + QUESTION, "-m", 20)
HI = ("generate", "-p", "hi", "-m", 2)
OFF = ("--kv-profile", "off")
QUIET = ("--verbose", "F")
EVICTING = (
    "--kv-evict",
    "triattention:warmup=256:trigger=64",
    "--kv-sinks",
    16,
    "--kv-window",
    32,
    "--kv-budget",
    300,
)
EVICTING = ("generate", "-p", "".join(facts(40)), "-m", 8, *EVICTING, "--prefill-step-size", 256, "--kv-recall", "off")


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """A rescue service that finds by words."""
    made = Server(tmp_path_factory.mktemp("rescue") / "data", embedder="none")
    yield made
    made.stop()


def test_answer_alone_is_on_stdout(quick):
    """The plan comes before it and the statistics after, on stderr, or nowhere."""
    result = quick(*ASK, *PACKED)
    assert (result.code, result.out) == (0, "417295\n")
    plan, stats = result.err.split("prompt: ")
    for line in (r"layers +keys +values +bytes +fp16", r"0-5 +tq4 +tq4 +[\d.]+ [kM]B +[\d.]+ [kM]B"):
        assert re.search(rf"^{line}", plan, re.MULTILINE)
    assert "the first 16 tokens, the last 32 and" in plan
    assert re.match(r"[\d,]+ tokens, [\d.]+ tok/s, first token after [\d.]+ s\n", stats)
    for line in (
        r"generation: \d+ tokens, [\d.]+ tok/s \(stop\)",
        r"KV cache: \d+ tokens in [\d.]+ [kM]B; fp16 takes [\d.]+ MB, [\d.]+x as much.*",
        r"peak memory: [\d.]+ [MG]B",
    ):
        assert re.search(rf"^{line}$", stats, re.MULTILINE)
    assert quick(*ASK, *QUIET) == (0, "417295\n", "")


def test_a_shadow_changes_nothing_and_is_reported(quick):
    shown = quick(*ASK, *PACKED, "--kv-shadow", 2)
    assert (shown.code, shown.out) == (0, "417295\n")
    assert re.search(r"^5 +[\d.]+ +[\d.]+ +[\d.e-]+ +[\d.e-]+$", shown.err, re.MULTILINE)
    assert re.search(r"predictions of \d+ tokens: KLD [\d.e-]+, the same most likely token in [\d.]+ %", shown.err)
    report = json.loads(quick(*ASK, *PACKED, "--kv-shadow", 2, "--json").out)
    assert report["text"] == "417295"
    assert len(report["shadow"]["layers"]) == 6
    assert report["shadow"]["kld"] > 0
    for words, says in (((*OFF, "--kv-shadow", 2), "nothing is compressed"), (("--kv-shadow", 0), "1 or more")):
        refused = quick(*HI, *words)
        assert refused.code == 2
        assert says in refused.err


def test_plan_says_what_the_kernels_do_not_read(quick):
    err = quick(*HI, "--kv-key", "q8_0", "--kv-value", "turbo3", "--kv-boundary", 1).err
    rows = [line.split()[:3] for line in err.splitlines() if line.startswith(("0", "1", "5"))]
    assert rows == [["0", "q8_0", "q8"], ["1-4", "q8_0", "tq3"], ["5", "q8_0", "q8"]]
    assert err.count("boundary layer") == 2
    assert "no GPU kernels for q8_0/q8, q8_0/tq3: attention decodes with mlx's operations\n" in err
    assert "no GPU kernels" not in quick(*HI).err


def test_formats_are_chosen_for_so_many_bits(cli, tmp_path):
    """And a file keeps them."""
    words = (*PACKED[2:], "--kv-mean-bits", 4.2)
    answer = cli(*ASK, *words, "--json")
    assert "formats for 4.2 bits a value take 4.1" in answer.err
    assert answer.json["text"] == "417295"
    assert answer.json["plan"]["allocation"]["bits"] <= 4.2
    formats = [layer["key"] for layer in answer.json["plan"]["layers"]]
    assert len(set(formats)) > 1
    file = tmp_path / "cache.safetensors"
    assert cli("cache_prompt", "-p", TEXT, "--prompt-cache-file", file, *words).code == 0
    again = cli("generate", "-p", QUESTION, "-m", 20, "--json", "--prompt-cache-file", file).json
    assert (again["text"], [layer["key"] for layer in again["plan"]["layers"]]) == ("417295", formats)
    refused(cli(*HI, "--kv-mean-bits", 4, "--kv-profile", "small"), "--kv-mean-bits and --kv-profile both choose")
    unknown = zoo_model(tmp_path / "short", "llama", max_position_embeddings=400)
    refused(cli(*HI, "--model", unknown, "--kv-mean-bits", 4), "is measured on 512 tokens", "allows 400 positions")


def test_plan_says_which_layers_stay_as_they_are(quick, tmp_path):
    plan = quick(*HI, "--model", zoo_model(tmp_path / "gemma3", "gemma3_text")).err
    assert "KV cache of gemma3_text" in plan
    assert re.search(r"^2 others +as they are +RotatingKVCache", plan, re.MULTILINE)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--kv-bits", 4, "--quantized-kv-start", 1234), "mlx-lm's own, at 4 bits from 1,234 tokens on"),
        (OFF, "mlx-lm's own"),
    ],
)
def test_mlx_lms_own_cache_has_no_plan_and_no_ratio(cli, flags, says):
    err = cli(*ASK, *flags).err
    assert err.startswith(f"KV cache: {says}\nprompt: ")
    assert re.search(r"^KV cache: \d+ tokens in [\d.]+ MB$", err, re.MULTILINE)


def test_numbers_are_those_of_the_arrays(quick, exact):
    """One JSON object, whose ratio is measured, and the plan's forecast is exact."""
    result = quick(*ASK, *PACKED, "--json", *QUIET)
    assert (result.code, result.err, result.out.count("\n")) == (0, "", 1)
    answer = result.json
    assert set(answer) == {"text", "stats", "plan", "recalled", "rescued"}
    assert (answer["text"], answer["plan"]["config"]["key"], len(answer["plan"]["layers"])) == ("417295", "tq4", 6)
    stats, measured = answer["stats"], answer["stats"]["cache"]
    assert stats["finish_reason"] == "stop"
    assert min(stats[name] for name in ("ttft", "prompt_tps", "generation_tps", "peak_memory", "prompt_tokens")) > 0

    model, tokenizer = exact
    cache = mlx_tq.make_prompt_cache(model, KVConfig(key="tq4", value="tq4", sinks=16, window=32))
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": TEXT + QUESTION}], add_generation_prompt=True)
    with mlx_tq.compressed(model):
        last = list(mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=20, prompt_cache=cache))[-1]
    assert (stats["prompt_tokens"], stats["generation_tokens"]) == (len(prompt), last.generation_tokens)
    assert measured["tokens"] == cache[0].offset
    assert measured["nbytes"] == sum(layer.nbytes for layer in cache)
    tokens, layers, heads, dim = cache[0].offset, 6, 2, 128
    assert measured["fp16_nbytes"] == tokens * layers * heads * 2 * dim * 2
    assert measured["ratio"] == measured["fp16_nbytes"] / measured["nbytes"]
    assert sum(layer["nbytes"] for layer in answer["plan"]["layers"]) == measured["nbytes"]


def test_ratio_of_mlx_lms_own_caches(cli):
    """--kv-bits is measured too: codes, and a scale and a bias a group, from where it was asked for."""

    def measured(*flags):
        return cli(*ASK, *flags, "--json").json["stats"]["cache"]

    cache = measured("--kv-bits", 4, "--kv-group-size", 32, "--quantized-kv-start", 0)
    padded = -(-cache["tokens"] // 256) * 256 / cache["tokens"]
    assert cache["ratio"] == pytest.approx(16 / (4 + 32 / 32) / padded, rel=1e-6)
    assert measured("--kv-bits", 4)["ratio"] == measured(*OFF)["ratio"] == 1


def test_answer_is_cut_where_positions_end(quick, tmp_path):
    """-1 is all that the model allows; more than that is cut, with a warning."""
    model = zoo_model(tmp_path / "short", "llama", max_position_embeddings=40)
    words = ("generate", "--model", model, "--ignore-chat-template", "-p", "The city of", "--json")
    unlimited, cut, few = (quick(*words, "-m", count) for count in (-1, 500, 4))
    assert unlimited.json["text"] == cut.json["text"]
    stats = unlimited.json["stats"]
    assert stats["prompt_tokens"] + stats["generation_tokens"] == 40
    assert "warning" not in unlimited.err
    assert "warning: the model allows 40 positions: at most" in cut.err
    assert (few.json["stats"]["finish_reason"], few.json["stats"]["generation_tokens"]) == ("length", 4)


def test_prompt_from_a_pipe_and_from_a_file(quick, tmp_path):
    """A file is taken as it is; -p turns \\n into a line break."""
    file = tmp_path / "prompt.txt"
    file.write_text(TEXT + QUESTION, encoding="utf-8")
    words = ("generate", "-m", 20, *QUIET)
    assert quick(*words, "--prompt-file", file).out == quick(*words, stdin=TEXT + QUESTION).out == "417295\n"
    file.write_text(r"a\nb")
    words = ("generate", "-m", 1, "--json", "--ignore-chat-template")
    counts = [
        quick(*words, *flag).json["stats"]["prompt_tokens"] for flag in (("--prompt-file", file), ("-p", r"a\nb"))
    ]
    assert counts[0] > counts[1]


def test_a_type_to_compute_in(quick, tmp_path):
    """--dtype is that of the caches: a tail in float32 takes twice as much. A draft model computes in it too."""
    half, full = (quick(*HI, "--dtype", dtype, "--json").json["stats"]["cache"] for dtype in ("float16", "float32"))
    assert full["nbytes"] > 1.5 * half["nbytes"]
    assert full["tokens"] == half["tokens"]
    model = float32_model(tmp_path / "wide")
    words = (*HI, "--json", "--dtype", "float16", "--model", model)
    assert quick(*words).json["stats"]["cache"] == half
    assert quick(*words, "--draft-model", model).code == 0


def test_what_is_said_and_comes_out_of_eviction(quick):
    """Policy, budget and calibration before; one warning; rounds and what stayed after."""
    result = quick(*EVICTING)
    assert (
        "eviction: triattention:trigger=64:warmup=256 keeps 300 tokens, calibrated on questions and text ("
        in result.err
    )
    assert (
        result.err.count("warning: evicted tokens are gone, and the answer may miss what they said; --kv-recall auto")
        == 1
    )
    assert " rounds (" in result.err
    assert "% stayed" in result.err
    answer = quick(*EVICTING, "--json").json
    stats = answer["stats"]["cache"]
    assert stats["rounds"] > 0
    assert stats["evicted"] == round((1 - stats["retention"]) * stats["tokens"])
    assert stats["tokens"] - stats["evicted"] <= 300 + 64 + 20
    assert answer["plan"]["eviction"]["budget_tokens"] == 300


def test_a_document_and_its_question_in_one_prompt(quick):
    """Without recall the answer is wrong; with it the archive gives back what it needs, and the screen says so."""
    text, question = facts(40)
    words = ("generate", "-p", f"{text}\n\n{question}", "-m", 12)
    words = (*words, "--kv-evict", "recency", "--kv-budget", 240)
    words = (*words, "--kv-sinks", 16, "--kv-window", 32, "--prefill-step-size", 128)
    lost = quick(*words, "--json", "--kv-recall", "off").json
    found = quick(*words, "--json", "--kv-recall", 96).json
    assert ("417295" in lost["text"], "417295" in found["text"]) == (False, True)
    assert lost["recalled"] is None
    assert 0 < len(found["recalled"]["positions"]) <= 96 < found["recalled"]["archived"]
    assert found["stats"]["prompt_tokens"] == lost["stats"]["prompt_tokens"]
    for each, disk in ((lost, False), (found, True)):
        cache, evicted = each["stats"]["cache"], each["stats"]["cache"]["evicted"]
        assert (cache["archived"], cache["dropped"]) == ((evicted, 0) if disk else (0, evicted))
        assert (cache["archived_nbytes"] > 0) == disk
        assert each["plan"]["cache"]["dropped" if disk else "archived"] == 0
        back = len(each["recalled"]["positions"]) if disk else 0  # their bytes are live, too
        assert cache["live"] == cache["tokens"] - evicted + back
    # In one step of the whole document, whose round is held before the question.
    at_once = quick(*words[:-2], "--json", "--kv-recall", 96).json
    assert ("417295" in at_once["text"], at_once["recalled"]["archived"] > 96) == (True, True)
    both = quick(*words, "--json", "--kv-recall", 96, "--kv-key", "q8~tq4", "--kv-recent", 32).json  # of two formats
    assert ("417295" in both["text"], both["recalled"]["archived"] > 96) == (True, True)
    tokens = lost["stats"]["prompt_tokens"]
    just = [*words[: words.index("--kv-budget")], "--kv-budget", tokens - 128 - 8, *words[words.index("--kv-sinks") :]]
    due = quick(*just, "--json", "--kv-recall", 96).json  # by the question alone
    assert due["recalled"]["archived"]
    assert found["recalled"]["by_search"] == []
    shown = quick(*words)
    assert "417295" in shown.out
    assert re.search(r"recalled: tokens [\d, -]+ of [\d,]+ archived", shown.err)
    assert re.search(r"Tokens: [\d,]+ in memory \(.*B\), [\d,]+ archived \(.*B\), 0 dropped", shown.err)
    assert "archived on disk until the run ends, up to 20.00 GB or a tenth of the free disk" in shown.err
    assert quick(*words, "--json", "--kv-archive", "off").json["text"] == lost["text"]
    refused(quick(*words, "--kv-archive", "off", "--kv-recall", 96), "--kv-recall 96 has nothing to bring back with")
    refused(
        quick(*words, "--kv-archive", "off", "--kv-recall", "auto"), "--kv-recall auto has nothing to bring back with"
    )
    refused(quick(*words, "--kv-archive", "off", "--kv-archive-limit", "1GB"), "is archived: take --kv-archive on, or")
    refused(quick("generate", "-p", text, "--kv-archive", "off"), "--kv-archive is given, but no token leaves")
    assert "argument --kv-archive: 'maybe' is neither on nor off" in quick(*words, "--kv-archive", "maybe").err
    assert (
        "the answer may miss what they said; --kv-archive on brings it back" in quick(*words, "--kv-archive", "off").err
    )
    assert "may miss what they said" not in quick(*words, "--kv-recall", "off", "--kv-shadow", 8).err
    refused(quick(*words, "--kv-recall", "some"), "recall is 'some'; write tokens to reload at once (256)")
    refused(
        quick(*words, "--kv-recall", 96, "--draft-model", EMBEDDED), "cannot be combined with --draft-model. Drop one"
    )
    beside = quick(*words, "--draft-model", EMBEDDED).err
    assert re.search(r"eviction: recency\S* keeps 240 tokens; no rows come back beside --draft-model\n", beside)
    assert "warning: evicted tokens are gone, and the answer may miss what they said.\n" in beside


def test_the_rescue_service_is_asked_when_a_prompt_is_read(quick, service):
    """As rows where they are archived, else quoted before the question; then the service forgets it all."""
    text, question = facts(40)
    words = ("generate", "-p", f"{text}\n\n{question}", "-m", 12, "--kv-evict", "recency")
    words = (*words, "--kv-budget", 300, "--kv-sinks", 16, "--kv-window", 32, "--prefill-step-size", 128)
    words = (*words, "--rescue", service.url, "--rescue-timeout", 60)
    rows = quick(*words, "--kv-recall", 32, "--json").json
    assert "417295" in rows["text"]
    assert (len(rows["recalled"]["by_search"]) > 16, rows["rescued"]["tokens"]) == (True, 0)
    quoted = quick(*words, "--kv-recall", "off", "--json").json
    assert ("417295" in quoted["text"], quoted["recalled"]) == (True, None)
    more = quoted["stats"]["prompt_tokens"] - rows["stats"]["prompt_tokens"]
    assert more == quoted["rescued"]["tokens"] > sum(stop - start for start, stop in quoted["rescued"]["ranges"])
    assert "brought back: tokens " in quick(*words, "--kv-recall", "off").err
    assert service.http.get("/sessions").json()["sessions"] == []
    for words_of, says in (
        (("--rescue", "banana"), "rescue is 'banana'; it must be off, auto or a URL"),
        (("--rescue-timeout", "inf"), "timeout is inf; it must be above 0 and at most 86,400 seconds"),
        (("--rescue", "off"), "--rescue-timeout is given, but no text comes back: add --rescue auto, or drop it"),
    ):
        refused(quick(*words, "--model", "none", *words_of), says)  # before a model is loaded
    refused(quick(*ASK, "--rescue", "auto"), "--rescue is given, but no token leaves: add --kv-evict triattention")
    refused(quick(*words, "--kv-recall", "off", "--kv-shadow", 8), "--rescue cannot be combined with --kv-shadow")


def test_eviction_where_positions_end(quick, tmp_path):
    """Evicted tokens keep theirs: a warning from 90 % on, and a prompt that would not fit is an error."""
    model = zoo_model(tmp_path / "short", "llama", max_position_embeddings=200)
    words = ("generate", "--model", model, "--ignore-chat-template", "--kv-evict", "triattention:warmup=32")
    words = (*words, "--kv-sinks", 4, "--kv-window", 24, "--kv-budget", 60, "--prefill-step-size", 32, "-p")
    few, many = "The city of " * 20, "The city of " * 100
    count = quick(*words, few, "-m", 1, "--json").json["stats"]["prompt_tokens"]
    for tokens, warned in ((180 - count, False), (181 - count, True)):
        result = quick(*words, few, "-m", tokens)
        warning = "of the model's 200 positions. Evicted tokens keep theirs"
        assert (result.code, warning in result.err) == (0, warned)
    full = quick(*words, few, "-m", -1, "--json").json["stats"]
    assert full["prompt_tokens"] + full["generation_tokens"] == 200
    assert full["cache"]["evicted"] > 0
    refused(quick(*words, many), "tokens; the model allows 200 with its answer. Shorten the prompt")


def test_a_draft_model_evicts_too(cli, tmp_path):
    """With statistics of its own, also where --kv-calibration gives the model's."""
    path = tmp_path / "stats.safetensors"
    assert cli("calibrate", "--text-share", 1, "--tokens", 64, "-o", path).code == 0
    words = ("generate", "--ignore-chat-template", "-p", facts(12)[0], "-m", 8, "--json", "--kv-calibration", path)
    words = (*words, "--kv-evict", "triattention:warmup=64", "--kv-sinks", 4, "--kv-window", 24, "--kv-budget", 60)
    draft = zoo_model(tmp_path / "draft", "qwen3")
    stats = cli(*words, "--prefill-step-size", 64, "--draft-model", draft, "--num-draft-tokens", 3).json["stats"]
    assert stats["cache"]["rounds"] > 0
    assert stats["generation_tokens"] > 0
