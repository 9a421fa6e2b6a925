"""Prefill a prompt once with cache_prompt, and continue from its file: ours, and mlx-lm's."""

import mlx.core as mx
import mlx_lm.models.cache as native_cache
import pytest
from models.gguf_files import write_gguf

from mlx_tq import load_prompt_cache

from .tools import EMBEDDED, FLOAT32, PACKED, copy_model, facts, packed_model, refused, zoo_model

TEXT, QUESTION = facts(12)
ASK = ("-p", QUESTION, "-m", 20, "--verbose", "F")
OFF = ("--kv-profile", "off")


@pytest.fixture
def saved(quick, tmp_path):
    file = tmp_path / "saved.safetensors"
    result = quick("cache_prompt", "-p", TEXT, "--prompt-cache-file", file, *PACKED)
    assert result.code == 0
    return file


@pytest.fixture
def native(mlx_lm, tmp_path):
    """The same, saved by mlx-lm."""
    file = tmp_path / "native.safetensors"
    mlx_lm("cache_prompt", "--model", EMBEDDED, "--prompt", TEXT, "--prompt-cache-file", file)
    return file


@pytest.mark.parametrize(
    "flags",
    [pytest.param(OFF, marks=pytest.mark.full), PACKED, pytest.param((), marks=pytest.mark.full)],
    ids=["off", "packed", "default"],
)
def test_continuing_equals_one_prompt(quick, tmp_path, flags):
    file = tmp_path / "cache.safetensors"
    result = quick("cache_prompt", "-p", "-", "--prompt-cache-file", file, *flags, stdin=TEXT)
    assert (result.code, result.out) == (0, "")
    assert (flags == OFF) or "KV cache of needle, " in result.err
    assert "tok" in result.err.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == [file.name], "no temporary file is left"
    before = file.read_bytes()
    at_once = quick("generate", "-p", TEXT + QUESTION, "-m", 20, "--json", *flags).json
    continued = quick("generate", "-p", QUESTION, "-m", 20, "--json", "--prompt-cache-file", file).json
    assert continued["text"] == at_once["text"] == "417295"
    assert continued["stats"]["prompt_tokens"] < 40
    ours, theirs = continued["stats"]["cache"], at_once["stats"]["cache"]
    assert ours["tokens"] == theirs["tokens"]
    assert ours["nbytes"] <= theirs["nbytes"], "a file holds no spare capacity"
    assert file.read_bytes() == before


@pytest.mark.full
def test_system_prompts_and_prefilled_responses(quick, saved):
    for flags in (("--prefill-response", "It is 41"), ("--chat-template-config", '{"enable_thinking": false}')):
        at_once = quick("generate", "-p", TEXT + QUESTION, "-m", 20, "--verbose", "F", *PACKED, *flags)
        continued = quick("generate", *ASK, *flags, "--prompt-cache-file", saved)
        assert continued.out == at_once.out
        assert continued.out.strip()


def test_template_that_strips_the_prompt(quick, tmp_path):
    """Llama's templates trim a message; a question from `echo` ends in a line break."""
    assert "m['content']" in (template := (EMBEDDED / "tokenizer_config.json").read_text())
    assert "| trim" not in template
    model = copy_model(tmp_path / "model", template=lambda t: t.replace("m['content']", "m['content'] | trim"))
    file = tmp_path / "cache.safetensors"
    words = ("--model", model, "--prompt-cache-file", file)
    assert quick("cache_prompt", "-p", "The code is 12.", *words).code == 0
    result = quick("generate", "-m", 3, *words, "--verbose", "F", stdin="What is the code?\n")
    assert (result.code, result.err) == (0, "")


def test_file_of_mlx_lm_with_off(quick, mlx_lm, native):
    theirs = mlx_lm("generate", "--model", EMBEDDED, *ASK, "--prompt-cache-file", native)
    for named in ((), ("--model", EMBEDDED)):
        assert quick("generate", *ASK, *OFF, *named, "--prompt-cache-file", native).out == theirs
    # The cache is taken to hold what comes before the prompt.
    words = ("--model", EMBEDDED, *ASK, "--system-prompt", "Answer.", "--prompt-cache-file", native)
    assert quick("generate", *words, *OFF).out == mlx_lm("generate", *words)


@pytest.mark.full
def test_a_file_that_is_not_compressed_is_mlx_lms_too(quick, mlx_lm, native, tmp_path):
    file = tmp_path / "ours.safetensors"
    for _ in range(2):  # the second one replaces the first
        assert quick("cache_prompt", "--model", EMBEDDED, "-p", TEXT, "--prompt-cache-file", file, *OFF).code == 0
    words = ("generate", *ASK, "--prompt-cache-file")
    assert mlx_lm(*words, file) == mlx_lm(*words, native) == quick(*words, file).out == "417295\n"
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    refused(quick(*words, file), "is damaged (its checksum differs)", code=1)


@pytest.mark.full
def test_a_compressed_file_is_decoded_for_mlx_lm(cli, mlx_lm, tmp_path, embedded):
    saved, file = tmp_path / "saved.safetensors", tmp_path / "decoded.safetensors"
    assert cli("cache_prompt", "-p", TEXT, "--prompt-cache-file", saved, *PACKED).code == 0
    result = cli("cache_prompt", "--decode", saved, "--model", EMBEDDED, "--prompt-cache-file", file)
    assert (result.code, result.out) == (0, "")
    packed = load_prompt_cache(saved, model=embedded[0]).caches
    for cache, own in zip(packed, native_cache.load_prompt_cache(str(file)), strict=True):
        assert own.offset == cache.offset
        for held, handle in zip((own.keys, own.values), cache.keys_and_values(), strict=True):
            assert mx.array_equal(held[:, :, : own.offset], handle.materialize()).item()
    theirs = mlx_lm("generate", *ASK, "--prompt-cache-file", file)
    assert theirs == cli("generate", *ASK, "--prompt-cache-file", saved).out == "417295\n"
    words = ("cache_prompt", "--decode", saved, "--prompt-cache-file", file)
    evicts = (*PACKED, "--kv-evict", "recency:granularity=16:trigger=16", "--kv-budget", 64, "--prefill-step-size", 64)
    assert cli("cache_prompt", "-p", TEXT, "--prompt-cache-file", saved, *evicts).code == 0
    assert cli("generate", *ASK, "--prompt-cache-file", saved).out == "417295\n"  # recalls from the file
    refused(cli(*words), "tokens were evicted from the cache", code=1)


def test_file_of_mlx_lm_is_compressed(quick, native):
    words = ("generate", "-p", QUESTION, "-m", 20, "--json", "--prompt-cache-file", native, *PACKED)
    answer = quick(*words, "--kv-key", "tq4", "--kv-normalize", "off").json  # which keeps less in so short a text
    assert answer["text"] == "417295"
    assert answer["stats"]["cache"]["ratio"] > 1.2
    assert {layer["key"] for layer in answer["plan"]["layers"]} == {"tq4"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("made", "valid", "others"),
    [
        (
            ("--kv-bits", 8, "--quantized-kv-start", 0),
            ("--kv-bits", 8),
            {
                ("--kv-bits", 4): "not --kv-bits 4",
                ("--kv-bits", 8, "--kv-group-size", 32): "has groups of 64, not --kv-group-size 32",
            },
        ),
        (
            ("--max-kv-size", 256),
            ("--max-kv-size", 256),
            {("--max-kv-size", 99): "not --max-kv-size 99", ("--kv-bits", 8): "--max-kv-size 256, not --kv-bits 8"},
        ),
        ((), (), {("--max-kv-size", 256): "was made without --max-kv-size"}),
    ],
    ids=["bits", "size", "plain"],
)
def test_a_file_of_mlx_lm_names_the_flag_that_made_it(quick, mlx_lm, tmp_path, made, valid, others):
    file = tmp_path / "theirs.safetensors"
    mlx_lm("cache_prompt", "--model", EMBEDDED, "--prompt", TEXT, "--prompt-cache-file", file, *made)
    words = ("generate", *ASK, "--prompt-cache-file", file)
    theirs = mlx_lm("generate", "--model", EMBEDDED, *ASK, *valid, "--prompt-cache-file", file)
    assert quick(*words, *(valid or OFF)).out == theirs
    for flags, says in others.items():
        refused(quick(*words, *flags), says)
    if made:
        flag = " ".join(map(str, valid))
        says = f"was made by mlx-lm with {flag}, and cannot be compressed. Add {flag}, or make it again without"
        for flags in (PACKED, ()):
            refused(quick(*words, *flags), says, code=1)
        assert quick(*words, *OFF).out == theirs


def test_batch_file_of_mlx_lm_is_refused(quick, tmp_path, embedded):
    file, model = tmp_path / "batch.safetensors", embedded[0]
    caches = [native_cache.BatchKVCache([0, 1]) for _ in model.layers]
    model(mx.array([[1, 2, 3], [0, 1, 2]]), cache=caches)
    native_cache.save_prompt_cache(str(file), caches, {"model": str(EMBEDDED), "tokenizer_config": "{}"})
    refused(quick("generate", *ASK, *OFF, "--prompt-cache-file", file), "BatchKVCache, the model a KVCache", code=1)


@pytest.mark.full
def test_model_of_the_file_is_used(quick, tmp_path):
    model, file = zoo_model(tmp_path / "llama", "llama"), tmp_path / "cache.safetensors"
    assert quick("cache_prompt", "--model", model, "-p", TEXT, "--prompt-cache-file", file).code == 0
    words = ("generate", "-p", QUESTION, "-m", 5, "--json", "--prompt-cache-file", file)
    unnamed, named = quick(*words).json, quick(*words, "--model", model).json
    assert unnamed["plan"]["model_type"] == "llama"
    assert unnamed["text"] == named["text"]


@pytest.fixture
def packed_file(cli, tmp_path):
    """A folder of a GGUF model, and a file that was made with weights in another form than the model's own."""
    model, file = tmp_path / "model.gguf", tmp_path / "cache.safetensors"
    write_gguf(model, "llama", "Q4_0")
    flags = ("--dtype", "float16", "--dequantize", "on")
    assert cli("cache_prompt", "--model", model, "-p", TEXT, "--prompt-cache-file", file, *flags).code == 0
    return model, file


def test_model_and_type_of_the_file_are_used(cli, packed_file, tmp_path, monkeypatch):
    model, file = packed_file
    words = ("generate", "-p", QUESTION, "-m", 5, "--verbose", "F", "--prompt-cache-file", file)
    every_flag = ("--model", model, "--dtype", "float16", "--dequantize", "on")
    named = cli(*words, *every_flag)
    assert (named.code, named.err) == (0, "")
    for flags in ((), every_flag[4:], every_flag[:2], every_flag[2:4]):
        assert cli(*words, *flags) == named
    monkeypatch.chdir(tmp_path)  # where the model's path is another, and after that the same
    assert cli(*words, "--model", "model.gguf") == named
    made = ("cache_prompt", "--model", "model.gguf", "-p", TEXT, *every_flag[2:], "--prompt-cache-file", file)
    assert cli(*made).code == 0
    monkeypatch.chdir("/")
    assert cli(*words) == named
    decoded = tmp_path / "decoded.safetensors"
    assert cli("cache_prompt", "--decode", file, "--prompt-cache-file", decoded).code == 0


@pytest.mark.full
@pytest.mark.parametrize("mode", [pytest.param("mxfp4", marks=pytest.mark.full), "nvfp4"])
def test_type_of_a_model_whose_scales_are_bytes(cli, mlx_lm, tmp_path, mode):
    model, file = tmp_path / "model", tmp_path / "cache.safetensors"
    mlx_lm("convert", "--hf-path", EMBEDDED, "--mlx-path", model, "-q", "--q-mode", mode)
    flags = ("--model", model, *FLOAT32, "--dequantize", "off")
    assert cli("cache_prompt", "-p", TEXT, "--prompt-cache-file", file, *flags).code == 0
    words = ("generate", "-p", QUESTION, "-m", 5, "--verbose", "F", "--prompt-cache-file", file)
    assert cli(*words).code == 0
    assert cli(*words, *flags) == cli(*words)
    refused(cli(*words, "--dtype", "float16"), f"made with --model {model} and --dtype float32, not with")


@pytest.mark.full
def test_type_of_a_model_of_several_types(cli, tmp_path):
    """The file names none, so that a type on the command line contradicts nothing."""

    def mix(weights):
        return {name: w.astype(mx.float32) if "norm" in name else w for name, w in weights.items()}

    model, file = copy_model(tmp_path / "model", mix), tmp_path / "cache.safetensors"
    assert cli("cache_prompt", "--model", model, "-p", TEXT, "--prompt-cache-file", file).code == 0
    words = ("generate", "-p", QUESTION, "-m", 5, "--verbose", "F", "--prompt-cache-file", file)
    assert cli(*words).code == 0
    refused(cli(*words, *FLOAT32), f"was made with {model}, whose weights are not those of this model", code=1)


def test_flags_that_contradict_the_file_are_named_before_weights_are_read(cli, packed_file, tmp_path):
    model, file = packed_file
    made = f"{file} was made with --model {model}, --dtype float16 and --dequantize on"
    model.write_bytes(model.read_bytes()[:-100_000])
    words = ("generate", "-p", QUESTION, "--prompt-cache-file", file)
    drop = "Drop that flag: the file names what it needs"
    refused(cli(*words), "it ends in the middle")  # which the others do not notice
    refused(cli(*words, "--dtype", "float32"), f"{made}, not with --dtype float32. {drop}")
    for other in (EMBEDDED, zoo_model(tmp_path / "other", "llama")):
        refused(cli(*words, "--model", other), f"{made}, not with --model {other}. {drop}")
    refused(
        cli(*words, "--model", EMBEDDED, "--dtype", "bfloat16"),
        f"{made}, not with --model {EMBEDDED} and --dtype bfloat16. Drop those flags: the file names what it needs",
    )
    assert cli("cache_prompt", "-p", TEXT, "--prompt-cache-file", file).code == 0
    (tmp_path / "adapter_config.json").touch()
    refused(
        cli(*words, "--dequantize", "on", "--adapter-path", tmp_path),
        f"{file} was made with --model needle and --dtype bfloat16, not with --adapter-path {tmp_path} and "
        "--dequantize on. Drop those flags",
    )


@pytest.mark.full
def test_draft_model_with_a_file(quick, saved, tmp_path):
    draft = copy_model(tmp_path / "draft", lambda weights: {k: w * 1.01 for k, w in weights.items()})
    words = ("generate", *ASK, "--prompt-cache-file", saved)
    assert quick(*words, "--draft-model", draft).out == quick(*words).out == "417295\n"


def test_another_configuration(quick, saved):
    words = ("generate", *ASK, "--prompt-cache-file", saved)
    refused(quick(*words, "--kv-profile", "small"), "made with another configuration", "sinks is 16, not 128", code=1)
    refused(quick(*words, *PACKED, "--kv-key", "q8"), "key is 'stcq4', not 'q8'", code=1)
    assert quick(*words, *PACKED).code == 0
    assert quick(*words, "--kv-sinks", 16).code == 0, "other settings are the file's"
    refused(quick(*words, "--kv-sinks", 8), "sinks is 16, not 8. Drop those options", code=1)
    for flag in ("--kv-bits", "--max-kv-size"):
        refused(quick(*words, flag, 8), f"{flag} cannot change")


@pytest.mark.full
def test_a_model_of_packed_weights_continues_from_its_file(quick, tmp_path):
    """On a CPU its weights become dense in float32, and no weight is rounded to the type of the scales."""
    model, file = packed_model(tmp_path / "packed"), tmp_path / "cache.safetensors"
    made = quick("cache_prompt", "--model", model, "--prompt", "One two.", "--prompt-cache-file", file)
    assert made.code == 0, made.err
    for flags in ((), ("--model", model, "--dequantize", "on", "--dtype", "float32")):
        loaded = quick("generate", "--prompt-cache-file", file, "-p", "Three.", "-m", 2, *flags)
        assert loaded.code == 0, loaded.err


def test_another_model(quick, saved, native, tmp_path):
    other, words = zoo_model(tmp_path / "other", "llama"), ("generate", *ASK, "--prompt-cache-file")
    finetuned = copy_model(tmp_path / "finetuned", lambda weights: {k: w * 1.01 for k, w in weights.items()})
    for model in (other, finetuned):
        refused(quick(*words, native, *OFF, "--model", model), f"with --model {EMBEDDED}, not with --model {model}")
    refused(quick(*words, saved, "--model", other), "made with --model needle and --dtype float32, not with")
    made, given = "needle in float32", f"{finetuned} in float32"
    says = f"was made with {made}, whose weights are not those of this model ({given}). Load that model."
    refused(quick(*words, saved, "--model", finetuned), says, code=1)
    same = copy_model(tmp_path / "same")
    assert quick(*words, saved, "--model", same).code == 0


@pytest.mark.full
def test_relative_path_in_a_file_of_mlx_lm(quick, mlx_lm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, file = copy_model(tmp_path / "model"), tmp_path / "native.safetensors"
    mlx_lm("cache_prompt", "--model", "./model", "--prompt", TEXT, "--prompt-cache-file", file)
    words = ("generate", *ASK, *OFF, "--prompt-cache-file", file, "--model")
    for name in ("./model", "model", model):
        assert quick(*words, name).out == "417295\n"
    refused(quick(*words, copy_model(tmp_path / "other")), "made with --model ./model, not with --model")


def test_truncated(quick, saved, native):
    for file in (saved, native):
        whole = file.read_bytes()
        for keep, flags in ((0, ()), (5, OFF), (5000, ()), (len(whole) - 1, OFF)):
            file.write_bytes(whole[:keep])
            refused(quick("generate", *ASK, *flags, "--prompt-cache-file", file), str(file), "another copy", code=1)


def test_foreign_and_missing(quick, tmp_path):
    text, image = tmp_path / "text.safetensors", tmp_path / "image.safetensors"
    text.write_text("No arrays here." * 100)
    mx.save_safetensors(str(image), {"pixels": mx.zeros((2, 2))}, {"1.0": "KVCache"})
    for file, says in (
        (EMBEDDED / "model.safetensors", ("is not a prompt cache", "mlx_tq.cache_prompt")),
        (text, ("damaged or no cache file",)),
        (image, ("damaged",)),
        (tmp_path / "none.safetensors", ("there is no cache file",)),
        (tmp_path, ("there is no cache file",)),
    ):
        refused(quick("generate", *ASK, "--prompt-cache-file", file), *says, code=1)


def test_unsupported_model_with_off(quick, tmp_path):
    model, file = zoo_model(tmp_path / "gemma2", "gemma2"), tmp_path / "cache.safetensors"
    words = ("--model", model, "--prompt-cache-file", file)
    assert quick("cache_prompt", "-p", "The city", *words, *OFF).code == 0
    result = quick("generate", *words, "-p", "of", "-m", 3, "--json", "--verbose", "F")
    assert (result.code, result.err, result.json["plan"]) == (0, "", None)


@pytest.mark.full
def test_a_compacted_prompt_answers(quick, tmp_path):
    """The row of the code is kept in the heads that find it, and the text around it in none."""
    text, file = facts(40)[0], tmp_path / "cache.safetensors"
    whole = quick("cache_prompt", "-p", text, "--prompt-cache-file", file, *PACKED)
    size = file.stat().st_size
    small = quick("cache_prompt", "-p", text, "--prompt-cache-file", file, *PACKED, "--compact", "30%")
    assert (whole.code, small.code) == (0, 0)
    assert file.stat().st_size < 0.5 * size
    answer = quick("generate", "-p", QUESTION, "-m", 20, "--json", "--prompt-cache-file", file).json
    assert answer["text"] == "417295"
