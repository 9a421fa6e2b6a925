"""The answer goes to stdout, the plan and the statistics to stderr; eviction and recall in one prompt."""

import re
import shutil

import mlx_lm
import pytest
from models.gguf_files import vocabulary, write_gguf
from rescue.harness import Server

import mlx_tq

from .tools import EMBEDDED, PACKED, facts, float32_model, refused, zoo_model

TEXT, QUESTION = facts(24)
ASK = ("generate", "-p", TEXT + QUESTION, "-m", 20)
HI = ("generate", "-p", "hi", "-m", 2)
OFF = ("--kv-profile", "off")
QUIET = ("--verbose", "F")
REGIONS = ("--kv-sinks", 16, "--kv-window", 32)
LONG_TEXT, LONG_QUESTION = facts(40)
DOCUMENT = ("generate", "-p", f"{LONG_TEXT}\n\n{LONG_QUESTION}", "-m", 12, "--kv-evict", "recency", *REGIONS)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    made = Server(tmp_path_factory.mktemp("rescue") / "data", embedder="none")
    yield made
    made.stop()


def has_line(pattern, text):
    return re.search(rf"^{pattern}$", text, re.MULTILINE) is not None


def test_answer_alone_is_on_stdout(quick):
    result = quick(*ASK, *PACKED)
    assert (result.code, result.out) == (0, "417295\n")
    short = ("generate", "-p", "".join(facts(4)), "-m", 20)
    for temperature in ("5e-324", "1e-5"):
        assert quick(*short, *PACKED, *QUIET, "--dtype", "float16", "--temp", temperature).out == "417295\n"
    plan, stats = result.err.split("prompt: ")
    assert has_line(r"layers +keys +values +bytes +float32 cache *", plan)
    assert has_line(r"0-5 +stcq4 +tq4 +[\d.]+ [kM]B +[\d.]+ [kM]B *", plan)
    assert "Full precision (float32): first 16 tokens, last 32, and up to 63 before those\n" in plan
    assert re.match(r"[\d,]+ tokens, [\d.]+ tok/s, first token after [\d.]+ s\n", stats)
    assert has_line(r"generation: \d+ tokens, [\d.]+ tok/s \(stop\)(, \d+ of \d+ drafted tokens accepted)?", stats)
    compared = "mlx-lm's float32 cache takes"
    assert has_line(rf"KV cache: \d+ tokens in [\d.]+ [kM]B; {compared} [\d.]+ MB, [1-9][\d.]+x as much", stats)
    assert has_line(r"peak memory: [\d.]+ [MG]B", stats)
    assert quick(*ASK, *QUIET) == (0, "417295\n", "")


@pytest.mark.full
def test_packed_weights_become_dense_on_a_cpu(cli, tmp_path):
    """Where half of the memory is enough, and not with mlx-lm's own cache, unless --dequantize says so."""
    path = write_gguf(tmp_path / "model.gguf", "llama", "Q4_0")
    words = ("generate", "--model", path, "-p", "one two", "-m", 2)
    native = ("--kv-profile", "off")
    said = r"Weights dequantized, which is faster on a CPU: [\d.]+ [kM]B instead of [\d.]+ [kM]B\. --dequantize off .*"
    assert has_line(said, cli(*words).err)
    assert has_line(said, cli(*words, "--memory", "100MB", "--context", 300).err)
    with pytest.warns(UserWarning, match="the weights stay packed, which is slow on a CPU: dense, they would take"):
        assert "Weights dequantized" not in cli(*words, "--memory", "2MB", "--context", 20).err
    for flags in (("--dequantize", "on"), ("--dequantize", "off"), native, ("--kv-bits", 8)):
        assert "eights" not in cli(*words, *flags).err
    weights = {flags: cli(*words, *flags, "--json").json["weights"] for flags in ((), native, ("--dequantize", "off"))}
    dense, *packed = weights.values()
    assert packed == [{"nbytes": dense["packed_nbytes"], "packed_nbytes": None}] * 2
    assert dense["nbytes"] > 3 * dense["packed_nbytes"]
    assert cli(*words, *native, "--dequantize", "on", "--json").json["weights"] == dense


@pytest.mark.full
def test_a_shadow_changes_nothing_and_is_reported(quick):
    words = (*ASK, *PACKED, "--kv-shadow", 2)
    shown = quick(*words)
    assert (shown.code, shown.out) == (0, "417295\n")
    assert has_line(r"5 +[\d.]+ +[\d.]+ +[\d.e-]+ +[\d.e-]+", shown.err)
    assert re.search(r"Next token, \d+ tokens: KLD [\d.e-]+, the same most likely token in [\d.]+ %", shown.err)
    report = quick(*words, "--json").json
    assert report["text"] == "417295"
    assert len(report["shadow"]["layers"]) == 6
    assert report["shadow"]["kld"] > 0


def test_the_plan_names_formats_without_kernels(quick):
    err = quick(*HI, "--kv-key", "q8_0", "--kv-value", "turbo3", "--kv-boundary", 1).err
    rows = [line.split()[:3] for line in err.splitlines() if line.startswith(("0", "1", "5"))]
    assert rows == [["0", "q8_0", "q8"], ["1-4", "q8_0", "tq3"], ["5", "q8_0", "q8"]]
    assert err.count("boundary layer") == 2
    assert "No GPU kernels for q8_0/q8, q8_0/tq3: attention dequantizes with mlx operations\n" in err
    assert "No GPU kernels" not in quick(*HI).err


@pytest.mark.full
def test_formats_are_chosen_for_mean_bits_and_kept_in_a_file(cli, tmp_path):
    words = (*REGIONS, "--kv-mean-bits", 4.2)
    text, question = facts(10)  # in the model's own type, whose losses are shipped
    answer = cli("generate", "-p", text + question, "-m", 20, *words, "--json")
    assert "Formats for 4.2 bits per value take 4.1" in answer.err
    assert answer.json["text"] == "417295"
    assert answer.json["plan"]["allocation"]["bits"] <= 4.2
    formats = [layer["key"] for layer in answer.json["plan"]["layers"]]
    assert len(set(formats)) > 1
    bits = ("--prompt-cache-file", tmp_path / "cache.safetensors", "--kv-mean-bits")
    assert cli("cache_prompt", "-p", text, *bits, 4.2, *REGIONS).code == 0
    ask = ("generate", "-p", question, "-m", 20, "--json", *bits[:2])
    for again in (cli(*ask).json, cli(*ask, *bits[2:], 4.2).json):
        assert (again["text"], [layer["key"] for layer in again["plan"]["layers"]]) == ("417295", formats)
    refused(cli(*ask, *bits[2:], 3), "made with another configuration: key is", code=1)
    short = zoo_model(tmp_path / "short", "llama", max_position_embeddings=400)
    refused(cli(*HI, "--model", short, "--kv-mean-bits", 4), "are measured on 512 tokens", "allows 400 positions")


@pytest.mark.parametrize(
    "named", [(), ("--model", "needle"), ("--model", EMBEDDED)], ids=["by default", "name", "folder"]
)
def test_the_bundled_model_is_needle(quick, named):
    assert quick(*HI, *named).err.startswith("KV cache of needle, ")


def test_the_plan_names_caches_that_stay_as_they_are(quick, tmp_path):
    plan = quick(*HI, "--model", zoo_model(tmp_path / "gemma3", "gemma3_text")).err
    assert "KV cache of gemma3, " in plan
    assert re.search(r"^2 others +unchanged +RotatingKVCache", plan, re.MULTILINE)


@pytest.mark.parametrize(
    ("flags", "description"),
    [
        (("--kv-bits", 4, "--quantized-kv-start", 1234), "mlx-lm's own, at 4 bits from 1,234 tokens on"),
        (OFF, "mlx-lm's own"),
    ],
)
def test_mlx_lms_cache_has_no_plan_and_no_ratio(cli, flags, description):
    err = cli(*HI, *flags).err
    assert err.startswith(f"KV cache: {description}\nprompt: ")
    assert has_line(r"KV cache: \d+ tokens in [\d.]+ MB", err)


def test_max_kv_size_says_that_its_cache_is_not_compressed(cli):
    sized = ("--max-kv-size", 64)
    says = (
        "warning: --max-kv-size 64 chooses mlx-lm's rotating cache, which is not compressed. "
        "For a compressed cache of limited size, use --kv-evict and --kv-budget instead."
    )
    for flags in ((), QUIET):
        assert says in " ".join(cli(*HI, *sized, *flags).err.split())
    assert "warning" not in cli(*HI, *sized, *OFF).err
    refused(cli(*HI, *sized, "--kv-profile", "small"), "--max-kv-size cannot be combined with --kv-profile")


@pytest.mark.parametrize(
    ("name", "flags", "says"),
    [
        ("llama", ("--max-kv-size", 64), "--max-kv-size 64 has no effect on this model, which makes its own caches"),
        ("gemma3_text", ("--kv-bits", 4), "cannot quantize the caches of this model (a RotatingKVCache)"),
        ("deepseek_v3", ("--kv-bits", 4), "cannot quantize the caches of this model (latents)"),
        ("deepseek_v32", ("--kv-bits", 4), "cannot quantize the caches of this model ("),
    ],
)
def test_mlx_lms_flags_that_would_do_nothing_are_refused(quick, tmp_path, name, flags, says):
    refused(quick(*HI, "--model", zoo_model(tmp_path / name, name), *flags, *QUIET), says)


def test_numbers_are_those_of_the_arrays(quick, exact):
    result = quick(*ASK, *PACKED, "--json", *QUIET)
    assert (result.code, result.err, result.out.count("\n")) == (0, "", 1)
    answer = result.json
    assert set(answer) == {"text", "stats", "plan", "weights", "ran", "recalled", "rescued"}
    assert answer["weights"]["packed_nbytes"] is None  # those of this model are dense
    assert (answer["text"], answer["plan"]["config"]["key"], len(answer["plan"]["layers"])) == ("417295", "stcq4", 6)
    stats, measured = answer["stats"], answer["stats"]["cache"]
    assert stats["finish_reason"] == "stop"
    assert min(stats[name] for name in ("ttft", "prompt_tps", "generation_tps", "peak_memory", "prompt_tokens")) > 0

    model, tokenizer = exact
    cache = mlx_tq.make_prompt_cache(model, profile="small", sinks=16, window=32)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": TEXT + QUESTION}], add_generation_prompt=True)
    with mlx_tq.compressed_attention(model):
        last = list(mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=20, prompt_cache=cache))[-1]
    assert (stats["prompt_tokens"], stats["generation_tokens"]) == (len(prompt), last.generation_tokens)
    assert measured["tokens"] == cache[0].offset
    assert measured["nbytes"] == sum(layer.nbytes for layer in cache)
    layers, heads, dim = 6, 2, 128
    assert measured["native_nbytes"] == -(-cache[0].offset // 256) * 256 * layers * heads * 2 * dim * 4
    assert measured["ratio"] == measured["native_nbytes"] / measured["nbytes"]
    assert sum(layer["nbytes"] for layer in answer["plan"]["layers"]) == measured["nbytes"]


@pytest.mark.full
def test_ratio_of_mlx_lms_caches(cli):
    """--kv-bits stores codes, and a scale and a bias per group, from --quantized-kv-start on."""

    def measured(*flags):
        return cli(*HI, *flags, "--json").json["stats"]["cache"]

    cache = measured("--kv-bits", 4, "--kv-group-size", 32, "--quantized-kv-start", 0)
    assert cache["ratio"] == pytest.approx(16 / (4 + 32 / 32), rel=1e-6)
    assert measured("--kv-bits", 4)["ratio"] == measured(*OFF)["ratio"] == 1


@pytest.mark.full
@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=pytest.mark.full), "float32"])
@pytest.mark.parametrize(
    "evict",
    [pytest.param((), marks=pytest.mark.full), ("--kv-evict", "recency", "--kv-budget", 200, *REGIONS)],
    ids=["all", "some"],
)
def test_the_cache_to_compare_with_is_what_off_reports(cli, dtype, evict):
    """In the type of the run, with allocated room on both sides; where nothing is compressed, nothing is compared."""
    for count in (2, 24):
        ask = ("generate", "-p", " ".join(facts(count)), "-m", 3, "--dtype", dtype)
        off, shown = cli(*ask, *OFF, "--json").json["stats"]["cache"], cli(*ask, *evict)
        cache = cli(*ask, *evict, "--json").json["stats"]["cache"]
        assert (off["tokens"], off["native_nbytes"], off["native_dtype"]) == (cache["tokens"], off["nbytes"], dtype)
        assert (cache["native_nbytes"], cache["native_dtype"]) == (off["nbytes"], dtype)
        is_short = cache["tokens"] < (160 if evict else 288)
        assert is_short == (count == 2)
        assert has_line(r"KV cache: \d+ tokens in .*B; compression starts at \d+ tokens", shown.err) == is_short
        line = rf"KV cache: \d+ tokens in .*B; mlx-lm's {dtype} cache takes .*B, [1-9][\d.]*x as much"
        assert has_line(line, shown.err) == (not is_short)


def test_an_answer_ends_with_the_context(quick, tmp_path):
    model = zoo_model(tmp_path / "short", "llama", max_position_embeddings=40)
    words = ("generate", "--model", model, "--ignore-chat-template", "-p", "The city of", "--json")
    unlimited, cut, few = (quick(*words, "-m", count) for count in (-1, 500, 4))
    assert unlimited.json["text"] == cut.json["text"]
    stats = unlimited.json["stats"]
    assert stats["prompt_tokens"] + stats["generation_tokens"] == 40
    assert "warning" not in unlimited.err
    assert "warning: the model's context is 40 tokens: at most" in cut.err
    assert (few.json["stats"]["finish_reason"], few.json["stats"]["generation_tokens"]) == ("length", 4)


def test_prompt_from_a_pipe_and_from_a_file(quick, tmp_path):
    """Only -p turns \\n into a line break."""
    file = tmp_path / "prompt.txt"
    file.write_text(TEXT + QUESTION, encoding="utf-8")
    words = ("generate", "-m", 20, *QUIET)
    assert quick(*words, "--prompt-file", file).out == quick(*words, stdin=TEXT + QUESTION).out == "417295\n"
    file.write_text(r"a\nb")
    words = ("generate", "-m", 1, "--json", "--ignore-chat-template")
    typed, read = (quick(*words, *prompt).json["stats"] for prompt in (("-p", r"a\nb"), ("--prompt-file", file)))
    assert typed["prompt_tokens"] < read["prompt_tokens"]


@pytest.mark.full
def test_no_second_start_token_for_a_prompt_that_begins_with_one(quick, tmp_path):
    model, start = tmp_path / "model.gguf", vocabulary()["tokenizer.ggml.tokens"][1]
    keys = {"bos_token_id": 1, "add_bos_token": True}
    write_gguf(model, keys={f"tokenizer.ggml.{key}": value for key, value in keys.items()})
    words = ("generate", "--model", model, "--ignore-chat-template", "-m", 1, "--json", "-p")
    counts = {text: quick(*words, text).json["stats"]["prompt_tokens"] for text in ("hello", f"{start}hello")}
    assert len(set(counts.values())) == 1, counts


@pytest.mark.full
def test_compute_type(quick, tmp_path):
    """--dtype is that of the caches and of a draft model: a full-precision window in float32 takes twice as much."""
    half, full = (quick(*HI, "--dtype", dtype, "--json").json["stats"]["cache"] for dtype in ("float16", "float32"))
    assert full["nbytes"] > 1.5 * half["nbytes"]
    assert full["tokens"] == half["tokens"]
    model = float32_model(tmp_path / "wide")
    words = (*HI, "--json", "--dtype", "float16", "--model", model)
    assert quick(*words).json["stats"]["cache"] == half
    assert quick(*words, "--draft-model", model).code == 0


def test_eviction_is_described_before_and_measured_after(quick):
    policy = "triattention:warmup=256:trigger=64"
    words = ("generate", "-p", "".join(facts(40)), "-m", 8, "--kv-evict", policy, "--kv-budget", 300, *REGIONS)
    words = (*words, "--prefill-step-size", 256, "--kv-recall", "off")
    err = quick(*words).err
    assert "Eviction: triattention:trigger=64:warmup=256 keeps 300 tokens, calibrated on questions and text (" in err
    missing = "so the answer cannot use them. Add --kv-recall auto."
    assert err.count(f"warning: evicted tokens are dropped, {missing}\n") == 1
    assert has_line(r"eviction: \d+ rounds?, [\d.]+ s", err)
    answer = quick(*words, "--json").json
    stats = answer["stats"]["cache"]
    assert stats["rounds"] > 0
    assert stats["evicted"] == round((1 - stats["retention"]) * stats["tokens"])
    assert stats["tokens"] - stats["evicted"] <= 300 + 64 + 20
    assert answer["plan"]["eviction"]["budget_tokens"] == 300


@pytest.mark.full
def test_recall_in_one_prompt(quick):
    words = (*DOCUMENT, "--prefill-step-size", 128, "--kv-budget", 240)
    dropped = quick(*words, "--json", "--kv-recall", "off").json
    recalled = quick(*words, "--json", "--kv-recall", 96).json
    late = ("--kv-budget", recalled["stats"]["prompt_tokens"] - 128 - 8)  # only the question makes the round due
    assert quick(*words, "--json", "--kv-recall", 96, *late).json["recalled"]["archived"]
    assert ("417295" in dropped["text"], "417295" in recalled["text"]) == (False, True)
    assert dropped["recalled"] is None
    assert 0 < len(recalled["recalled"]["positions"]) <= 96 < recalled["recalled"]["archived"]
    assert recalled["recalled"]["by_search"] == []
    assert recalled["stats"]["prompt_tokens"] == dropped["stats"]["prompt_tokens"]
    for answer, archives in ((dropped, False), (recalled, True)):
        cache, evicted = answer["stats"]["cache"], answer["stats"]["cache"]["evicted"]
        assert (cache["archived"], cache["dropped"]) == ((evicted, 0) if archives else (0, evicted))
        assert cache["live"] + evicted == cache["tokens"]
        assert (cache["archived_nbytes"] > 0) == archives
        assert answer["plan"]["cache"]["dropped" if archives else "archived"] == 0
        reloaded = len(answer["recalled"]["positions"]) if archives else 0
        assert cache["recalled"] == reloaded
    assert quick(*words, "--json", "--kv-archive", "off").json["text"] == dropped["text"]


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(  # the only round is before the question
            ("--kv-budget", 240, "--prefill-step-size", 2048), marks=pytest.mark.full
        ),
        pytest.param(  # two key formats
            ("--kv-budget", 240, "--prefill-step-size", 128, "--kv-key", "q8~tq4", "--kv-recent", 32),
            marks=pytest.mark.full,
        ),
    ],
    ids=["one step", "two key formats"],
)
def test_recall_finds_the_fact(quick, flags):
    answer = quick(*DOCUMENT, *flags, "--json", "--kv-recall", 96).json
    assert ("417295" in answer["text"], answer["recalled"]["archived"] > 96) == (True, True)


def test_recall_is_shown(quick, tmp_path):
    words = (*DOCUMENT, "--prefill-step-size", 128, "--kv-budget", 240)
    shown = quick(*words)
    assert "417295" in shown.out
    assert re.search(r"Recalled \d+ of [\d,]+ archived tokens \([\d.]+ s\)", shown.err)
    counts = r"Tokens: ([\d,]+) in memory \(.*B; [1-9]\d* of them recalled\), ([\d,]+) archived \(.*B\), (\d+) dropped"
    (total,) = re.findall(r"KV cache: ([\d,]+) tokens in", shown.err)
    assert sum(map(int, re.search(counts, shown.err).groups())) == int(total)
    limit = re.search(r"are archived on disk until the run ends, at most ([\d.]+) (.B)\n", shown.err)
    nbytes = float(limit[1]) * {"GB": 1e9, "MB": 1e6}[limit[2]]
    assert nbytes == pytest.approx(min(20e9, shutil.disk_usage(tmp_path).free / 10), rel=0.1)
    missing = "so the answer cannot use them."
    assert f"{missing} Add --kv-archive on." in quick(*words, "--kv-archive", "off").err
    assert missing not in quick(*words, "--kv-recall", "off", "--kv-shadow", 8).err
    drafted = quick(*words, "--draft-model", EMBEDDED).err
    assert re.search(r"Eviction: recency\S* keeps 240 tokens; recall is disabled with --draft-model\n", drafted)
    assert f"warning: evicted tokens are dropped, {missing}\n" in drafted


@pytest.mark.full
def test_a_recall_that_cuts_a_sentence_is_shown(quick):
    words = (*DOCUMENT, "--prefill-step-size", 128, "--kv-budget", 240, "--kv-sinks", 28)  # a block ends in the fact
    for recall, is_partial in ((32, True), (96, False)):
        assert quick(*words, "--kv-recall", recall, "--json").json["recalled"]["partial"] == is_partial
        line = r"Recalled \d+ of [\d,]+ archived tokens \([\d.]+ s\)"
        partial = "; partial: a recalled sentence is incomplete" if is_partial else ""
        assert re.search(rf"^{line}{partial}$", quick(*words, "--kv-recall", recall).err, re.MULTILINE)


def test_rescue_in_one_prompt(quick, service):
    """Archived text that the service finds is recalled, other text is quoted; then the service forgets all of it."""
    words = (*DOCUMENT, "--kv-budget", 300, "--prefill-step-size", 128)
    words = (*words, "--rescue", service.url, "--rescue-timeout", 60)
    recalled = quick(*words, "--kv-recall", 32, "--json").json
    assert "417295" in recalled["text"]
    assert (len(recalled["recalled"]["by_search"]) > 16, recalled["rescued"]["tokens"]) == (True, 0)
    quoted = quick(*words, "--kv-recall", "off", "--json").json
    assert ("417295" in quoted["text"], quoted["recalled"]) == (True, None)
    more = quoted["stats"]["prompt_tokens"] - recalled["stats"]["prompt_tokens"]
    assert more == quoted["rescued"]["tokens"] > sum(stop - start for start, stop in quoted["rescued"]["ranges"])
    assert re.search(r"Quoted \d+ tokens of evicted text \([\d.]+ s\)", quick(*words, "--kv-recall", "off").err)
    assert service.http.get("/sessions").json()["sessions"] == []


@pytest.mark.full
def test_eviction_near_the_end_of_the_context(quick, tmp_path):
    """Evicted tokens keep their positions: a warning from 90 % on, and a prompt that would not fit is an error."""
    model = zoo_model(tmp_path / "short", "llama", max_position_embeddings=200)
    words = ("generate", "--model", model, "--ignore-chat-template", "--kv-evict", "triattention:warmup=32")
    words = (*words, "--kv-sinks", 4, "--kv-window", 24, "--kv-budget", 60, "--prefill-step-size", 32, "-p")
    few, many = "The city of " * 20, "The city of " * 100
    count = quick(*words, few, "-m", 1, "--json").json["stats"]["prompt_tokens"]
    for tokens, warned in ((180 - count, False), (181 - count, True)):
        result = quick(*words, few, "-m", tokens)
        warning = "of 200 positions. Eviction does not extend the context."
        assert (result.code, warning in result.err) == (0, warned)
    full = quick(*words, few, "-m", -1, "--json").json["stats"]
    assert full["prompt_tokens"] + full["generation_tokens"] == 200
    assert full["cache"]["evicted"] > 0
    refused(quick(*words, many), "tokens; the model allows 200, answer included. Shorten the prompt")


@pytest.mark.full
def test_a_draft_model_has_its_own_calibration(cli, tmp_path):
    path = tmp_path / "stats.safetensors"
    assert cli("calibrate", "--text-share", 1, "--tokens", 64, "-o", path).code == 0
    words = ("generate", "--ignore-chat-template", "-p", facts(12)[0], "-m", 8, "--json", "--kv-calibration", path)
    words = (*words, "--kv-evict", "triattention:warmup=64", "--kv-sinks", 4, "--kv-window", 24, "--kv-budget", 60)
    draft = zoo_model(tmp_path / "draft", "qwen3")
    stats = cli(*words, "--prefill-step-size", 64, "--draft-model", draft, "--num-draft-tokens", 3).json["stats"]
    assert stats["cache"]["rounds"] > 0
    assert stats["generation_tokens"] > 0
