"""What goes where: the answer to stdout, the rest to stderr; the plan before, the statistics after."""

import json
import re

import mlx_lm
import pytest

import mlx_tq
from mlx_tq.config import KVConfig

from .tools import PACKED, facts, run, zoo_model

TEXT, QUESTION = facts(24)
ASK = ("-p", TEXT + QUESTION, "-m", 20)


def test_answer_alone_is_on_stdout(cli):
    result = cli("generate", *ASK)
    assert (result.code, result.out) == (0, "417295\n")
    quiet = cli("generate", *ASK, "--verbose", "F")
    assert (quiet.out, quiet.err) == ("417295\n", "")


def test_plan_comes_before_and_statistics_after(cli):
    plan, stats = cli("generate", *ASK, *PACKED).err.split("prompt: ")
    assert re.search(r"^layers +keys +values +bytes +fp16", plan, re.MULTILINE)
    assert re.search(r"^0-5 +tq4 +tq4 +[\d.]+ [kM]B +[\d.]+ [kM]B", plan, re.MULTILINE)
    assert "the first 16 tokens, the last 32 and" in plan
    assert re.match(r"[\d,]+ tokens, [\d.]+ tok/s, first token after [\d.]+ s\n", stats)
    assert re.search(r"^generation: \d+ tokens, [\d.]+ tok/s \(stop\)$", stats, re.MULTILINE)
    assert re.search(
        r"^KV cache: \d+ tokens in [\d.]+ [kM]B; fp16 takes [\d.]+ MB, [\d.]+x as much$", stats, re.MULTILINE
    )
    assert re.search(r"^peak memory: [\d.]+ [MG]B$", stats, re.MULTILINE)


def test_plan_says_what_differs_by_layer(cli):
    plan = cli("generate", *ASK, *PACKED, "--kv-boundary", 1).err.split("prompt: ")[0]
    rows = [line.split()[:3] for line in plan.splitlines() if line.startswith(("0", "1", "5"))]
    assert rows == [["0", "q8", "q8"], ["1-4", "tq4", "tq4"], ["5", "q8", "q8"]]
    assert plan.count("boundary layer") == 2


def test_plan_says_what_the_kernels_do_not_read(cli):
    err = cli("generate", "-p", "hi", "-m", 2, "--kv-key", "q8_0", "--kv-value", "turbo3").err
    assert re.search(r"^0-5 +q8_0 +tq3 ", err, re.MULTILINE)
    assert "no GPU kernels for q8_0/tq3: attention decodes with mlx's operations\n" in err
    assert "no GPU kernels" not in cli("generate", "-p", "hi", "-m", 2).err


def test_plan_says_which_layers_stay_as_they_are(cli, tmp_path):
    model = zoo_model(tmp_path / "gemma3", "gemma3_text")
    plan = cli("generate", "--model", model, "-p", "hi", "-m", 2).err
    assert "KV cache of gemma3_text" in plan
    assert re.search(r"^2 others +as they are +RotatingKVCache", plan, re.MULTILINE)


def test_off_has_no_plan_and_no_ratio(cli):
    err = cli("generate", *ASK, "--kv-profile", "off").err
    assert err.startswith("KV cache: mlx-lm's own\nprompt: ")
    assert re.search(r"^KV cache: \d+ tokens in [\d.]+ MB$", err, re.MULTILINE)


def test_json_is_one_object(cli):
    result = cli("generate", *ASK, *PACKED, "--json", "--verbose", "F")
    assert (result.code, result.err, result.out.count("\n")) == (0, "", 1)
    answer = json.loads(result.out)
    assert set(answer) == {"text", "stats", "plan"}
    assert answer["text"] == "417295"
    stats = answer["stats"]
    assert stats["finish_reason"] == "stop"
    assert min(stats[name] for name in ("ttft", "prompt_tps", "generation_tps", "peak_memory", "prompt_tokens")) > 0
    assert answer["plan"]["config"]["key"] == "tq4"
    assert len(answer["plan"]["layers"]) == 6


def test_numbers_are_those_of_the_arrays(cli, embedded):
    """The ratio is measured, and the plan's forecast is exact."""
    answer = cli("generate", *ASK, *PACKED, "--json").json
    model, tokenizer = embedded
    cache = mlx_tq.make_prompt_cache(model, KVConfig(key="tq4", value="tq4", prefix=16, window=32))
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": TEXT + QUESTION}], add_generation_prompt=True)
    with mlx_tq.attention(model):
        last = list(mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=20, prompt_cache=cache))[-1]
    stats = answer["stats"]
    assert (stats["prompt_tokens"], stats["generation_tokens"]) == (len(prompt), last.generation_tokens)
    measured = stats["cache"]
    assert measured["tokens"] == cache[0].offset
    assert measured["nbytes"] == sum(layer.nbytes for layer in cache)
    tokens, layers, heads, dim = cache[0].offset, 6, 2, 128
    assert measured["fp16_nbytes"] == tokens * layers * heads * 2 * dim * 2
    assert measured["ratio"] == measured["fp16_nbytes"] / measured["nbytes"]
    assert sum(layer["nbytes"] for layer in answer["plan"]["layers"]) == measured["nbytes"]


@pytest.mark.parametrize(("flags", "bits"), [(["8"], 8), (["4", "--kv-group-size", "32"], 4)])
def test_ratio_of_mlx_lms_quantised_cache(cli, flags, bits):
    """--kv-bits is measured too: codes, and a scale and a bias a group."""
    words = ("--kv-bits", *flags, "--quantized-kv-start", 0, "--json")
    cache = cli("generate", *ASK, *words).json["stats"]["cache"]
    group = 32 if "32" in flags else 64
    padded = -(-cache["tokens"] // 256) * 256 / cache["tokens"]
    assert cache["ratio"] == pytest.approx(16 / (bits + 32 / group) / padded, rel=1e-6)


def test_quantisation_starts_where_asked(cli):
    ratios = [
        cli("generate", *ASK, "--kv-bits", 4, "--quantized-kv-start", start, "--json").json["stats"]["cache"]["ratio"]
        for start in (5000, 300)
    ]
    assert ratios[0] == 1 < ratios[1]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--kv-bits", 4, "--quantized-kv-start", 1234), "mlx-lm's own, at 4 bits from 1,234 tokens on"),
        (("--kv-profile", "off"), "mlx-lm's own"),
    ],
)
def test_mlx_lms_own_cache_is_named(cli, flags, says):
    assert f"KV cache: {says}\n" in cli("generate", "-p", "hi", "--max-tokens", 1, *flags).err


def test_off_ratio_is_one(cli):
    cache = cli("generate", *ASK, "--kv-profile", "off", "--json").json["stats"]["cache"]
    assert cache["ratio"] == 1
    assert cache["tokens"] > 300


def test_max_tokens_ends_with_length(cli):
    answer = cli("generate", "--ignore-chat-template", "-p", "The city", "-m", 4, "--json").json
    assert (answer["stats"]["finish_reason"], answer["stats"]["generation_tokens"]) == ("length", 4)


def test_answer_is_cut_where_positions_end(cli, tmp_path):
    """-1 is all that the model allows; more than that is cut, with a warning."""
    model = zoo_model(tmp_path / "short", "llama", max_position_embeddings=40)
    words = ("generate", "--model", model, "--ignore-chat-template", "-p", "The city of", "--json")
    unlimited, cut = cli(*words, "-m", -1), cli(*words, "-m", 500)
    assert unlimited.json["text"] == cut.json["text"]
    stats = unlimited.json["stats"]
    assert stats["prompt_tokens"] + stats["generation_tokens"] == 40
    assert "warning" not in unlimited.err
    assert "warning: the model allows 40 positions: at most" in cut.err


def test_prompt_from_a_pipe(cli):
    assert cli("generate", "-m", 20, "--verbose", "F", stdin=TEXT + QUESTION).out == "417295\n"


def test_prompt_from_a_file_is_taken_as_it_is(cli, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(TEXT + QUESTION, encoding="utf-8")
    assert cli("generate", "-m", 20, "--verbose", "F", "--prompt-file", file).out == "417295\n"
    file.write_text(r"a\nb")
    in_file = cli("generate", "-m", 1, "--json", "--ignore-chat-template", "--prompt-file", file).json
    typed = cli("generate", "-m", 1, "--json", "--ignore-chat-template", "-p", r"a\nb").json
    assert in_file["stats"]["prompt_tokens"] > typed["stats"]["prompt_tokens"], "-p turns \\n into a line break"


@pytest.mark.parametrize("env", [{"NO_COLOR": "1", "FORCE_COLOR": "1"}, {"NO_COLOR": "1", "TERM": "xterm-256color"}])
def test_no_color(env):
    words = ("generate", "-p", "Hello", "-m", 2)
    colour = run(*words, env={"FORCE_COLOR": "1"}).err
    plain = run(*words, env=env).err
    assert "\x1b[3" in colour or "\x1b[2" in colour
    assert not re.search(r"\x1b\[[\d;]*3\d", plain)
    assert "KV cache" in plain
