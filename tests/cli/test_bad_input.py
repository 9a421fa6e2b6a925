"""Requests that cannot be met: exit code 2, and one line that says what, which value, and what to do."""

import os
import socket
import subprocess

import pytest

from .tools import EMBEDDED, LIMIT, PACKED, command, environment, facts, run

HI = ("-p", "hi", "-m", 2, "--verbose", "F")
OFF = ("--kv-profile", "off")

# Words after `mlx_tq generate`, and what the line must say.
TABLE = {
    "key format": ((*HI, "--kv-key", "tq9"), "format 'tq9' is unknown; valid are fp16, fp8, q8, q8_0, "),
    "value format": ((*HI, "--kv-value", "Q8"), "format 'Q8' is unknown; valid are"),
    "profile": ((*HI, "--kv-profile", "tiny"), "profile 'tiny' is unknown; valid are off, safe, balanced, small"),
    "window": ((*HI, "--kv-window", -1), "window is -1; it must be 0 or more"),
    "prefix": ((*HI, "--kv-prefix", -128), "prefix is -128; it must be 0 or more"),
    "boundary": ((*HI, "--kv-boundary", -2), "boundary is -2; it must be 0 or more"),
    "outlier": ((*HI, "--kv-outlier", "-0.5"), "outlier is -0.5; it must be 0 or more"),
    "recent": ((*HI, "--kv-recent", 40), "recent is 40; it must be a multiple of 32"),
    "empty prompt": (("-p", ""), "the prompt is empty; give some text with -p"),
    "whitespace": (("-p", r" \n\t "), "the prompt is empty"),
    "two prompts": (("-p", "hi", "--prompt-file", "x"), "both --prompt and --prompt-file were given; give one"),
    "no file": (("--prompt-file", "/nope/x.txt"), "/nope/x.txt cannot be read"),
    "a folder": (("--prompt-file", "/"), "/ cannot be read"),
    "binary file": (("--prompt-file", EMBEDDED / "model.safetensors"), "can't decode byte"),
    "no tokens": (("-p", "hi", "-m", 0), "--max-tokens is 0; it must be 1 or more, or -1"),
    "fewer tokens": (("-p", "hi", "-m", -5), "--max-tokens is -5; it must be 1 or more, or -1"),
    "temperature": ((*HI, "--temp", -1), "--temp is -1.0; it must be 0 or more"),
    "no number": ((*HI, "--temp", "nan"), "--temp is nan; it must be 0 or more"),
    "share": ((*HI, "--top-p", 7), "--top-p is 7.0; it must be from 0 to 1"),
    "prefill step": ((*HI, "--prefill-step-size", 0), "--prefill-step-size is 0; it must be 1 or more"),
    "seed": ((*HI, "--seed", -1), "--seed is -1; it must be 0 or more"),
    "drafts": ((*HI, "--draft-model", EMBEDDED, "--num-draft-tokens", -1), "--num-draft-tokens is -1"),
    "cache size": ((*HI, "--max-kv-size", 0), "--max-kv-size is 0; it must be 1 or more"),
    "bits": ((*HI, "--kv-bits", 7), "--kv-bits 7"),
    "group": ((*HI, "--kv-bits", 4, "--kv-group-size", 17), "The supported group sizes are 32, 64"),
    "bits and profile": ((*HI, "--kv-bits", 4, "--kv-profile", "safe"), "--kv-bits is a cache of mlx-lm"),
    "bits and format": ((*HI, "--kv-bits", 4, "--kv-key", "q8"), "Drop it, or add --kv-profile off"),
    "size and profile": ((*HI, "--max-kv-size", 64, "--kv-profile", "small"), "--max-kv-size is a cache of mlx-lm"),
    "limit": ((*HI, "--kv-memory-limit", "1MB"), "needs 2.2 MB of KV cache; 1.0 MB are there"),
    "limit on nothing": ((*HI, "--kv-memory-limit", "1GB", *OFF), "--kv-memory-limit is for compressed caches"),
    "no JSON": ((*HI, "--chat-template-config", "{x"), "--chat-template-config is not JSON"),
    "no object": ((*HI, "--chat-template-config", "[1]"), "[1]; it must be a JSON object"),
    "eos": ((*HI, "--extra-eos-token", "<nope>"), "'<nope>' is not a token"),
    "image": ((*HI, "--image", "x.png"), "the model does not take images. Drop --image"),
    "adapter": ((*HI, "--adapter-path", "/nope"), "the adapter '/nope' has no adapter_config.json"),
    "draft": ((*HI, "--draft-model", "/nope/model"), "there is no model folder '/nope/model'"),
    "too long": (("-p", "one two " * 9000, "-m", 2), "the model allows 4,096 with its answer. Shorten the prompt"),
}


@pytest.mark.parametrize("name", TABLE)
def test_refused(cli, name):
    words, says = TABLE[name]
    result = cli("generate", *words)
    assert (result.code, result.out) == (2, "")
    (line,) = result.errors
    assert line.startswith("mlx_tq generate: ")
    assert says in line
    assert line.endswith(".")
    assert len(line) < 500
    assert result.err == f"{line}\n", "nothing but the reason: no plan, no progress, no traceback"


@pytest.mark.parametrize("size", ["4", "GB", "-1GB", "0GB", "4XB", "", "nanGB", "infGB"])
def test_sizes(cli, size):
    result = cli("generate", *HI, f"--kv-memory-limit={size}")
    assert (result.code, result.out) == (2, "")
    assert f"'{size}' is not a size" in result.err


@pytest.mark.parametrize("words", [("--max-tokens", "many"), ("--kv-window", "1.5"), ("--frobnicate",), ("extra",)])
def test_words_that_argparse_refuses(cli, words):
    result = cli("generate", "-p", "hi", *words)
    assert (result.code, result.out) == (2, "")
    assert result.err.splitlines()[-1].startswith("mlx_tq.generate: error: ")


def test_forecast_comes_before_prefill(cli, embedded):
    """The bytes needed, those there, and the context that would fit; nothing is generated."""
    text, question = facts(60)
    words = ("generate", "-p", text + question, "-m", 2000, *PACKED)
    messages = [{"role": "user", "content": text + question}]
    prompt = len(embedded[1].apply_chat_template(messages, add_generation_prompt=True))
    result = cli(*words, "--kv-memory-limit", "3MB", "--json")
    assert (result.code, result.out) == (2, "")
    assert f"a context of {prompt + 2000:,} tokens needs " in result.err
    assert "3.0 MB are there. About" in result.err
    assert "shorten the prompt or --max-tokens" in result.err
    fits = int(result.err.split("About ")[1].split(" tokens")[0].replace(",", ""))
    assert 1000 < fits < prompt + 2000


def test_bad_cache_prompt_requests(cli, tmp_path):
    file = tmp_path / "cache.safetensors"
    for words in (
        ("-p", " "),
        ("-p", "hi", "--kv-key", "x"),
        ("-p", "hi", "--model", "/nope/x"),
        ("-p", "one " * 9000),
    ):
        result = cli("cache_prompt", *words, "--prompt-cache-file", file)
        assert (result.code, result.out) == (2, "")
        assert len(result.errors) == 1
    assert cli("cache_prompt", "-p", "hi").code == 2, "a file must be named"
    assert not list(tmp_path.iterdir()), "nothing half written"


def test_nothing_on_standard_input():
    result = run("generate", stdin="")
    assert (result.code, result.out) == (2, "")
    assert result.errors == ["mlx_tq generate: the prompt is empty; give some text with -p, --prompt-file or on "
                             "standard input."]  # fmt: skip


def test_binary_on_standard_input():
    done = subprocess.run(
        command("generate"), input=b"\xff\xfe\x00", capture_output=True, env=environment(), timeout=LIMIT, check=False
    )
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"the prompt is not UTF-8 text" in done.stderr
    assert b"Traceback" not in done.stderr


def test_no_prompt_at_a_terminal():
    """Nobody waits for words that were never asked for."""
    ours, theirs = os.openpty()
    done = subprocess.run(
        command("generate"), stdin=theirs, capture_output=True, env=environment(), timeout=LIMIT, check=False
    )
    os.close(ours)
    os.close(theirs)
    assert done.returncode == 2
    assert b"there is no prompt; give one with -p TEXT, --prompt-file FILE or on standard input" in done.stderr


def test_hub_without_network():
    """A name that nobody has, and a hub that does not answer: said at once."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound but not listening: refuses, and nobody else gets the port
        hub = f"http://127.0.0.1:{closed.getsockname()[1]}"
        result = run(
            "generate", *HI, "--model", "mlx-tq/no-such-model", env={"HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0"}
        )
    assert (result.code, result.out) == (2, "")
    (line,) = result.errors
    assert "the model 'mlx-tq/no-such-model' cannot be loaded: there is no such folder, and the hub did not" in line
    assert "Give a folder with config.json and safetensors, a hub name" in line
    assert "Traceback" not in result.err


def test_hub_switched_off():
    result = run("generate", *HI, "--model", "mlx-tq/no-such-model", env={"HF_HUB_OFFLINE": "1"})
    assert (result.code, result.out) == (2, "")
    assert "there is no such folder, and the hub did not give it" in result.errors[0]
