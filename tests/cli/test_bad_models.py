"""Models that are missing, damaged, unknown, or not supported by a compressed cache."""

import copy
import io
import json
import pickle
import sys

import httpx2
import mlx.core as mx
import mlx_lm
import pytest
from jinja2 import TemplateError

from mlx_tq import load
from mlx_tq.errors import ConfigError, MlxTqError
from mlx_tq.models.tokenizer_limits import limit_tokenizer

from .tools import EMBEDDED, copy_model, refused, zoo_model

HI = ("-p", "hi", "-m", 2, "--verbose", "F")
OFF = ("--kv-profile", "off")
WEIGHTS = (EMBEDDED / "model.safetensors").read_bytes()
CONFIG = (EMBEDDED / "config.json").read_bytes()
NORM = "model.norm.weight"


def _config(**changes):
    return json.dumps({**json.loads(CONFIG), **changes}).encode()


def _weights_without(name):
    weights, file = dict(mx.load(str(EMBEDDED / "model.safetensors"))), io.BytesIO()
    del weights[name]
    mx.save_safetensors(file, weights)
    return file.getvalue()


# A file, what it holds instead, or None where it is gone, and what is said.
DAMAGED = {
    "weights without a tensor": ("model.safetensors", _weights_without(NORM), f"parameters: {NORM}. Download or"),
    "half of the weights": ("model.safetensors", WEIGHTS[: len(WEIGHTS) // 2], "Perhaps an incomplete download"),
    "no header": ("model.safetensors", b"\0" * 1000, "Invalid json header length"),
    "empty weights": ("model.safetensors", b"", "Download or convert it again"),
    "no weights": ("model.safetensors", None, "No safetensors"),
    "half of the config": ("config.json", CONFIG[:50], "a JSON file is damaged"),
    "config of another kind": ("config.json", b"{}", "model_type"),
    "config that contradicts itself": ("config.json", _config(num_attention_heads=5, hidden_size="x"), "does not fit"),
    "config without sizes": ("config.json", b'{"model_type": "qwen3"}', "config.json does not fit"),
    "no config": ("config.json", None, "Give a folder with config.json and safetensors"),
    "no tokenizer": ("tokenizer*", None, "tokenizer"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged(cli, tmp_path, name):
    pattern, content, says = DAMAGED[name]
    folder = copy_model(tmp_path / "model")
    for file in list(folder.glob(pattern)):
        file.unlink()
        if content is not None:
            file.write_bytes(content)
    line = refused(cli("generate", *HI, "--model", folder), says)
    assert f"the model '{folder}' cannot be loaded" in line or content is None


# Values of config.json that mlx-lm does not check.
WRONG = [
    {"vocab_size": 0}, {"vocab_size": 2**31}, {"num_attention_heads": 0}, {"num_key_value_heads": 0},
    {"hidden_size": 0}, {"hidden_size": 2**40}, {"head_dim": -1}, {"rope_scaling": 5}, {"rope_theta": "x"},
    {"num_hidden_layers": 10**9}, {"num_hidden_layers": 1e300}, {"text_config": {"num_hidden_layers": 10**9}},
    {"text_config": 7}, {"rms_norm_eps": "x" * 5000}, {"model_type": "base"}, {"model_type": "../x"},
    {"quantization": 4}, {"rope_theta": []}, {"rope_theta": [1e4, "x"]},
]  # fmt: skip


@pytest.mark.parametrize("config", WRONG, ids=str)
def test_config_with_a_wrong_value(tmp_path, config):
    with pytest.raises(MlxTqError, match=r"^the model .{15,600}\.$"):
        load(copy_model(tmp_path / "model", **config))


@pytest.mark.full
def test_config_with_a_rope_base_for_each_layer(tmp_path):
    bases = [1e4, 5_000_000.0, 2e4, 3e4]
    model, _ = load(zoo_model(tmp_path / "model", "step3p5", rope_theta=bases))
    assert [layer.self_attn.rope.base for layer in model.layers] == bases


@pytest.mark.parametrize("config", [{"model_type": "__init__"}, {"num_hidden_layers": 10**9}, {"rope_scaling": 5}])
def test_a_command_with_a_wrong_value_in_the_config(cli, tmp_path, config):
    result = cli("generate", *HI, "--model", copy_model(tmp_path / "model", **config))
    refused(result, "cannot be loaded: its ", code=2)


def _fail_to_load(monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(mlx_lm, "load", fail)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ImportError("Run pip install tiktoken."), r"it needs a package \(Run pip install tiktoken\)\. Install that\."),
        (httpx2.ReadTimeout("The read timed out"), r"it could not be downloaded from the hub \(The read timed out\)"),
    ],
)
def test_a_package_or_a_network_that_is_not_there(monkeypatch, error, says):
    _fail_to_load(monkeypatch, error)
    with pytest.raises(ConfigError, match=rf"^the model 'mlx-community/x' cannot be loaded: .*{says}"):
        load("mlx-community/x")


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("[malloc] Unable to allocate 80 bytes.")])
def test_too_little_memory_is_not_a_damaged_model(monkeypatch, error):
    _fail_to_load(monkeypatch, error)
    with pytest.raises(type(error)) as raised:
        load()
    assert raised.value is error


@pytest.mark.parametrize(
    ("config", "code", "says"),
    [
        ({"model_type": "frobnicator"}, 1, "Model type frobnicator not supported"),
        ({"num_hidden_layers": 7}, 2, "Missing 11 parameters"),
        ({"hidden_size": 512}, 1, "Expected shape"),
    ],
)
def test_config_of_another_model(cli, tmp_path, config, code, says):
    line = refused(cli("generate", *HI, "--model", copy_model(tmp_path / "model", **config)), says, code=code)
    assert len(line) < 500


@pytest.mark.parametrize(
    ("name", "config", "code", "says"),
    [
        ("gemma2", {}, 1, ("gemma2 ", "computes with the keys and values that it fetched", "Use --kv-profile off.")),
        ("mamba2", {"expand": 1}, 1, ("mamba2 ", "keeps no plain KV cache", "Use --kv-profile off.")),
        pytest.param(
            *("llama", {"head_dim": 40}, 2, ("layer 0 of llama", "head_dim 40 cannot be stored as q8", "valid are")),
            marks=pytest.mark.full,
        ),
        ("llama", {"head_dim": 72}, 2, ("layer 0 of llama", "head_dim 72 cannot be stored as q8", "valid are")),
    ],
)
def test_unsupported_architecture(cli, tmp_path, name, config, code, says):
    words = ("generate", *HI, "--model", zoo_model(tmp_path / "model", name, **config))
    refused(cli(*words), *says, code=code)
    assert cli(*words, *OFF).code == 0


@pytest.mark.full
@pytest.mark.parametrize("flags", [(), OFF], ids=["default", "off"])
@pytest.mark.parametrize("part", ["k_proj", "model.norm"])
def test_nan_weights(cli, tmp_path, part, flags):
    folder = copy_model(
        tmp_path / "model", lambda weights: {name: w * mx.nan if part in name else w for name, w in weights.items()}
    )
    refused(cli("generate", *HI, "--model", folder, *flags), "NaN", "Check its weights", code=1)
    if part == "k_proj" and not flags:  # found before a cache is saved
        file = tmp_path / "cache.safetensors"
        words = ("--model", folder, "--prompt-cache-file", file, "--kv-sinks", 0, "--kv-window", 0)
        result = cli("cache_prompt", "-p", "one two " * 90, *words)
        assert (result.code, result.out, "NaN or infinite" in result.err) == (1, "", True)
        assert not file.exists()


def test_template_that_refuses_a_system_prompt(cli, tmp_path):
    """Gemma's templates raise an error of their own."""
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    words = ("generate", *HI, "--model", copy_model(tmp_path / "model", template=lambda text: refusal + text))
    refused(cli(*words, "--system-prompt", "Be brief."), "System role not supported", "Drop --system-prompt")
    assert cli(*words).code == 0


ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
    "a loop in a filter": "{{ lipsum(n=10**9) }}",
    "a chain of filters": "{% for a in range(99999) %}{{ range(99999)|map('string')|join }}{% endfor %}",
}


@pytest.mark.full
@pytest.mark.parametrize(
    "template",
    [ENDLESS["nested loops"], *(pytest.param(ENDLESS[name], marks=pytest.mark.full) for name in list(ENDLESS)[1:])],
    ids=ENDLESS,
)
def test_template_without_end(cli, tmp_path, template):
    words = ("generate", *HI, "--model", copy_model(tmp_path / "model", template=lambda _: template))
    refused(cli(*words), "chat template refuses this conversation: rendering it takes more than 20,000,000 steps")


def test_template_that_fails_outside_answers(cli, tmp_path):
    model = copy_model(tmp_path / "model", template=lambda _: "{{ messages[7].content.x }}")
    saves = ("--prompt-cache-file", tmp_path / "cache.safetensors")
    for words in (("cache_prompt", "--prompt", "hi", *saves), ("calibrate", "-o", tmp_path / "x.safetensors")):
        result = cli(*words, "--model", model)
        assert result.code == 2
        assert "the model's chat template fails: " in result.err.splitlines()[-1]


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ messages[7].content.x }}", "{{ [1] | sum(9) }}"])
def test_template_that_fails(cli, tmp_path, template):
    refused(
        cli("generate", *HI, "--model", copy_model(tmp_path / "model", template=lambda _: template)),
        "the model's chat template refuses this conversation",
        "--ignore-chat-template",
    )


def test_regular_expression_of_a_tokenizer_that_fails_on_a_text(cli, tmp_path):
    path = copy_model(tmp_path / "model") / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    tokenizer["pre_tokenizer"]["pretokenizers"].insert(0, split)
    path.write_text(json.dumps(tokenizer))
    words = ("--model", path.parent, "-m", 2, "--verbose", "F", "--ignore-chat-template")
    refused(
        cli("generate", "-p", "x" * 40, *words), "fails on this text (Onig: Regex search error: retry-limit", code=1
    )
    assert cli("generate", "-p", "hi", *words).code == 0


@pytest.mark.parametrize("copy_", [copy.deepcopy, lambda tokenizer: pickle.loads(pickle.dumps(tokenizer))])
def test_a_copy_of_a_tokenizer_is_independent(copy_):
    tokenizer = load()[1]
    copied = copy_(tokenizer)
    messages = [{"role": "user", "content": "two words"}]
    assert copied.encode("two words") == tokenizer.encode("two words")
    assert copied.apply_chat_template(messages) == tokenizer.apply_chat_template(messages)
    copied.add_tokens(["two words"])
    assert copied.encode("two words") != tokenizer.encode("two words")


@pytest.mark.full
def test_a_generator_that_outlives_a_template_without_end():
    """A debugger that does not trace it leaves the function that counted its lines in place."""

    class Tokenizer:
        def encode(self, text):
            return [*text]

        def apply_chat_template(self, numbers):
            for _ in range(next(numbers)):
                pass

    limit_tokenizer(tokenizer := Tokenizer())
    numbers = (number for number in (10**9, 7))
    with pytest.raises(TemplateError, match="more than 20,000,000 steps"):
        tokenizer.apply_chat_template(numbers)
    before = sys.gettrace()
    sys.settrace(lambda *_: None)
    try:
        assert next(numbers) == 7
    finally:
        sys.settrace(before)


def test_draft_model_with_another_vocabulary(cli, tmp_path):
    path = copy_model(tmp_path / "draft") / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    del vocabulary[max(vocabulary, key=vocabulary.get)], tokenizer["model"]["merges"][-1]
    path.write_text(json.dumps(tokenizer))
    result = cli("generate", *HI, "--draft-model", path.parent)
    refused(result, "the draft model's vocabulary has 4095 tokens", "same tokenizer")


@pytest.mark.parametrize("dtype", ["fp32", "int8", mx.float16])
def test_a_type_that_is_none_to_compute_in(dtype):
    with pytest.raises(ConfigError, match=r"dtype .* is unknown; valid are float32, float16, bfloat16"):
        load(dtype=dtype)
