"""Models that are missing, damaged, unknown, or that no compressed cache can serve."""

import json

import mlx.core as mx
import pytest

from .tools import EMBEDDED, copy_model, zoo_model

HI = ("-p", "hi", "-m", 2, "--verbose", "F")


def refused(result, code, *says):
    assert (result.code, result.out) == (code, "")
    (line,) = result.errors
    assert result.err == f"{line}\n", "one line: no traceback, no plan"
    for words in says:
        assert words in line
    return line


def damage(folder, file, content):
    (folder / file).write_bytes(content)
    return folder


def _config(**changes):
    return json.dumps({**json.loads((EMBEDDED / "config.json").read_text()), **changes}).encode()


WEIGHTS = (EMBEDDED / "model.safetensors").read_bytes()
DAMAGED = {
    "half of the weights": ("model.safetensors", WEIGHTS[: len(WEIGHTS) // 2], "Perhaps an incomplete download"),
    "no header": ("model.safetensors", b"\0" * 1000, "Invalid json header length"),
    "empty weights": ("model.safetensors", b"", "Download or convert it again"),
    "half of the config": ("config.json", (EMBEDDED / "config.json").read_bytes()[:50], "a JSON file is damaged"),
    "config of another kind": ("config.json", b"{}", "model_type"),
    "config that contradicts itself": ("config.json", _config(num_attention_heads=5, hidden_size="x"), "does not fit"),
    "config without sizes": ("config.json", b'{"model_type": "qwen3"}', "config.json does not fit"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged(cli, tmp_path, name):
    file, content, says = DAMAGED[name]
    folder = damage(copy_model(tmp_path / "model"), file, content)
    refused(cli("generate", *HI, "--model", folder), 2, f"the model '{folder}' cannot be loaded", says)


@pytest.mark.parametrize(("file", "says"), [("config.json", "config.json"), ("model.safetensors", "No safetensors")])
def test_incomplete(cli, tmp_path, file, says):
    folder = copy_model(tmp_path / "model")
    (folder / file).unlink()
    refused(cli("generate", *HI, "--model", folder), 2, says, "Give a folder with config.json and safetensors")


def test_no_tokenizer(cli, tmp_path):
    folder = copy_model(tmp_path / "model")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    refused(cli("generate", *HI, "--model", folder), 2, "tokenizer")


@pytest.mark.parametrize("name", ["/nope/model", "./nope", "a b c", "x/y/z"])
def test_missing_folder(cli, name):
    refused(
        cli("generate", *HI, "--model", name), 2, f"there is no model folder {name!r}", "or nothing for the embedded"
    )


def test_file_for_a_folder(cli, tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    refused(cli("generate", *HI, "--model", file), 2, "is a file; models of mlx-lm are folders")
    refused(cli("generate", *HI, "--model", ""), 2, "the model's name is empty")


def test_unknown_model_type(cli, tmp_path):
    folder = copy_model(tmp_path / "model", model_type="frobnicator")
    refused(cli("generate", *HI, "--model", folder), 1, "Model type frobnicator not supported")


def test_weights_of_another_size(cli, tmp_path):
    folder = copy_model(tmp_path / "deeper", num_hidden_layers=7)
    line = refused(cli("generate", *HI, "--model", folder), 1, "Missing 11 parameters")
    assert len(line) < 500
    folder = copy_model(tmp_path / "wider", hidden_size=512)
    refused(cli("generate", *HI, "--model", folder), 1, "Expected shape")


@pytest.mark.parametrize(
    ("name", "config", "reason"),
    [
        ("gemma2", {}, "computes with the keys and values that it fetched"),
        ("mamba2", {"expand": 1}, "keeps no plain KV cache"),
    ],
)
def test_unsupported_architecture(cli, tmp_path, name, config, reason):
    """Refused by name, with the reason and the way out, which works."""
    folder = zoo_model(tmp_path / "model", name, **config)
    refused(cli("generate", *HI, "--model", folder), 1, f"{name} ", reason, "Use --kv-profile off.")
    assert cli("generate", *HI, "--model", folder, "--kv-profile", "off").code == 0


@pytest.mark.parametrize("dim", [40, 72])
def test_head_dim_that_a_format_cannot_take(cli, tmp_path, dim):
    folder = zoo_model(tmp_path / "model", "llama", head_dim=dim)
    words = ("generate", *HI, "--model", folder)
    refused(cli(*words), 2, "layer 0 of llama", f"head_dim {dim} cannot be stored as q8", "valid are")
    assert cli(*words, "--kv-profile", "off").code == 0


@pytest.mark.parametrize("flags", [(), ("--kv-profile", "off")], ids=["default", "off"])
@pytest.mark.parametrize("part", ["k_proj", "model.norm"])
def test_nan_weights(cli, tmp_path, part, flags):
    def poison(weights):
        return {name: w * mx.nan if part in name else w for name, w in weights.items()}

    folder = copy_model(tmp_path / "model", poison)
    refused(cli("generate", *HI, "--model", folder, *flags), 1, "NaN", "Check its weights")


def test_nan_is_found_before_a_cache_is_saved(cli, tmp_path):
    folder = copy_model(
        tmp_path / "model", lambda weights: {k: w * mx.nan if "v_proj" in k else w for k, w in weights.items()}
    )
    file = tmp_path / "cache.safetensors"
    flags = ("--kv-prefix", 0, "--kv-window", 0)
    result = cli("cache_prompt", "-p", "one two " * 40, "--model", folder, "--prompt-cache-file", file, *flags)
    assert (result.code, result.out) == (1, "")
    assert "NaN or infinite" in result.errors[0]
    assert not file.exists()


def test_template_that_refuses_a_system_prompt(cli, tmp_path):
    """Gemma's templates raise an error of their own."""
    folder = copy_model(tmp_path / "model")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    path.write_text(json.dumps({**config, "chat_template": refusal + config["chat_template"]}))
    words = ("generate", *HI, "--model", folder)
    refused(cli(*words, "--system-prompt", "Be brief."), 2, "System role not supported", "Drop --system-prompt")
    assert cli(*words).code == 0


def test_draft_model_with_another_vocabulary(cli, tmp_path):
    folder = copy_model(tmp_path / "draft")
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    last = max(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    del tokenizer["model"]["vocab"][last]
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-1]
    path.write_text(json.dumps(tokenizer))
    refused(cli("generate", *HI, "--draft-model", folder), 2, "draft model has a vocabulary of", "own tokenizer")
