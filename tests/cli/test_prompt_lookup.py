"""Commands draft by default, and answer without drafts where that is not possible."""

import json

import pytest

from mlx_tq.cli.options import EXCLUDES, Request
from mlx_tq.errors import ConfigError
from mlx_tq.generate import build_parser

from .tools import EMBEDDED, FLOAT32

LINE = "The access code for Victor is 0707. "
REPEATS = ("generate", "-p", LINE * 6 + "The", "-m", 12, "--ignore-chat-template", "--json")
EVICTS = ("--kv-evict", "recency", "--kv-sinks", 8, "--kv-window", 16, "--kv-budget", 48, "--prefill-step-size", 32)
VALUES = {"--draft-model": "x", "--kv-evict": "recency", "--kv-shadow": "8", "--image": "x.png"}


def drafted(result):
    assert result.code == 0, result.err
    return json.loads(result.out)["stats"]["drafted_tokens"]


def test_generate_drafts_by_default(quick):
    assert drafted(quick(*REPEATS)) > 0


def test_chat_drafts_by_default(cli):
    result = cli("chat", *FLOAT32, "-m", 12, stdin=f"{LINE * 3}Who has the code?\n" * 2)
    assert result.code == 0
    assert "drafted tokens accepted" in result.err


@pytest.mark.parametrize("flag", EXCLUDES["--prompt-lookup on"])
def test_only_lookup_that_is_typed_is_refused(flag):
    words = ("-p", "hi", flag, VALUES[flag])
    assert Request.from_args(build_parser().parse_args(words), {}).args.prompt_lookup == "auto"
    with pytest.raises(ConfigError, match=f"--prompt-lookup on cannot be combined with {flag}"):
        Request.from_args(build_parser().parse_args([*words, "--prompt-lookup", "on"]), {})


@pytest.mark.parametrize("flags", [EVICTS, ("--kv-shadow", 8), ("--max-kv-size", 32)], ids=lambda flags: flags[0])
def test_nothing_is_drafted_where_drafts_cannot_be_rolled_back(quick, flags):
    result = quick(*REPEATS, *flags)
    assert drafted(result) == 0
    assert ("Prompt lookup is off: " in result.err) == (flags[0] != "--kv-shadow")


def test_a_draft_model_drafts_instead(quick):
    """It drafts for every pass, also before text repeats."""
    result = quick(*REPEATS[:2], "One two", *REPEATS[3:], "--draft-model", EMBEDDED, "--num-draft-tokens", 2)
    assert drafted(result) >= 6
