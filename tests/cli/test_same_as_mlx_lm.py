"""Every flag of mlx_lm.generate means here what it means there."""

from importlib import import_module

import pytest

from mlx_tq.generate import build_parser

from .tools import EMBEDDED, facts

PROSE = "The history of the city began in the year"
TEXT, QUESTION = facts(8)
FREE = ("--ignore-chat-template", "-p", PROSE, "-m", 24)
SAMPLED = ("--temp", "1.0", "--seed", "7")
TRUNCATED = ("--temp", "0.8", "--top-p", "0.9", "--top-k", "40", "--min-p", "0.02", "--min-tokens-to-keep", "2")

CASES = {
    "chat": ("-p", TEXT + QUESTION, "-m", 20),
    "long option": ("--prompt", TEXT + QUESTION, "--max-tokens", 20),
    "escapes": ("-p", r"One.\n\tTwo.\n" + QUESTION, "-m", 12),
    "plain": FREE,
    "few tokens": (*FREE[:-1], 3),
    "sampled": (*FREE, *SAMPLED),
    "another seed": (*FREE, *SAMPLED[:3], 8),
    "truncated": (*FREE, *TRUNCATED, "--seed", 3),
    "xtc": (*FREE, "--temp", "1", "--seed", 3, "--xtc-probability", "0.9", "--xtc-threshold", "0.05"),
    "system prompt": ("-p", QUESTION, "--system-prompt", TEXT, "-m", 12),
    "prefill response": ("-p", TEXT + QUESTION, "--prefill-response", "It is 41", "-m", 12),
    "default template": ("-p", TEXT + QUESTION, "--use-default-chat-template", "-m", 12),
    "template config": ("-p", QUESTION, "-m", 12, "--chat-template-config", '{"enable_thinking": false}'),
    "extra eos": (*FREE, "--extra-eos-token", "Ġof", 4000),
    "extra eos, by number": (*FREE, "--extra-eos-token", 577),
    "prefill steps": ("-p", TEXT + QUESTION, "--prefill-step-size", 17, "-m", 12),
    "8 bits": ("-p", TEXT + QUESTION, "--kv-bits", 8, "--quantized-kv-start", 0, "-m", 20),
    "4 bits": (*FREE, "--kv-bits", 4, "--quantized-kv-start", 0, "--kv-group-size", 32),
    "2 bits": (*FREE, "--kv-bits", 2, "--quantized-kv-start", 0),
    "8 bits, late": (*FREE, "--kv-bits", 8, "--quantized-kv-start", 20),
    "rotating": ("-p", TEXT + QUESTION, "--max-kv-size", 64, "-m", 20),
    "draft": (*FREE, "--draft-model", EMBEDDED, "--num-draft-tokens", 2),
    "no-ops here": (*FREE, "--trust-remote-code", "--quantize-activations"),
}


def options(parser):
    return {action.dest: action for action in parser._actions if action.dest != "help"}


def test_every_flag_is_there():
    theirs = options(import_module("mlx_lm.generate").setup_arg_parser())
    ours = options(build_parser())
    assert set(theirs) < set(ours)
    for dest, action in theirs.items():
        mine = ours[dest]
        assert mine.option_strings == action.option_strings
        assert (mine.type, mine.nargs, mine.choices, mine.const) == (
            action.type, action.nargs, action.choices, action.const
        )  # fmt: skip
        assert mine.default == (None if dest == "prompt" else action.default), dest


def test_our_flags_have_help():
    theirs = options(import_module("mlx_lm.generate").setup_arg_parser())
    for dest, action in options(build_parser()).items():
        assert action.help or dest in theirs, f"--{dest} has no help"


@pytest.mark.parametrize("name", CASES)
def test_same_text(cli, mlx_lm, name):
    words = CASES[name]
    theirs = mlx_lm("generate", "--model", EMBEDDED, "--verbose", "F", *words)
    ours = cli("generate", "--kv-profile", "off", "--verbose", "False", *words)
    assert (ours.code, ours.err) == (0, "")
    assert ours.out == theirs
    assert ours.out.strip()


@pytest.mark.parametrize("name", ["8 bits", "rotating"])
def test_mlx_lms_caches_need_no_profile(cli, name):
    """--kv-bits N works as in mlx-lm, without a word about ours."""
    words = ("generate", "--verbose", "F", *CASES[name])
    assert cli(*words) == cli(*words, "--kv-profile", "off")


def test_options_change_the_text(cli):
    """The comparisons above compare something: each of these says something else than greedy decoding."""
    texts = {
        name: cli("generate", "--kv-profile", "off", "--verbose", "F", *CASES[name]).out
        for name in (
            "plain",
            "sampled",
            "another seed",
            "xtc",
            "truncated",
            "2 bits",
            "extra eos",
            "extra eos, by number",
        )
    }
    assert len(set(texts.values())) == len(texts), texts


def test_dash_reads_standard_input(cli, mlx_lm):
    words = ("--model", EMBEDDED, "--verbose", "F", "-p", "-", "-m", 12)
    theirs = mlx_lm("generate", *words, stdin=TEXT + QUESTION)
    assert cli("generate", *words, "--kv-profile", "off", stdin=TEXT + QUESTION).out == theirs


def test_verbose_text_is_the_text_between_mlx_lms_lines(cli, mlx_lm):
    theirs = mlx_lm("generate", "--model", EMBEDDED, *FREE)
    ours = cli("generate", "--kv-profile", "off", *FREE)
    assert theirs.split("==========\n")[1] == ours.out


def test_first_token_probabilities_are_not_needed_for_eos(cli):
    """An answer that ends at once is an empty line, not an error."""
    first = cli("generate", "--json", "--kv-profile", "off", *FREE[:-1], 1)
    assert first.json["stats"]["generation_tokens"] == 1
    result = cli("generate", "--verbose", "F", "-p", "x", "-m", 5, "--extra-eos-token", *range(4096))
    assert (result.code, result.out) == (0, "\n")
