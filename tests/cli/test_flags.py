"""Flags: those of mlx-lm have its names, types and defaults; every default is in the help; every name told is real."""

import argparse
import re
from importlib import import_module

import pytest

from mlx_tq import config
from mlx_tq.__main__ import COMMANDS
from mlx_tq.cache.recurrent_states import DEFAULT_STATES, STATE_FORMATS
from mlx_tq.cli import options as table
from mlx_tq.cli.parser import command_parser
from mlx_tq.kernels.backend import BACKENDS
from mlx_tq.models import DTYPES
from mlx_tq.policies.policy import policy_names
from mlx_tq.session.session import ON_FULL
from mlx_tq.speculative.lookup_mode import MODES

# Flags of mlx-lm's commands that ours do not have, and what is another's here, each with its reason.
ABSENT = {
    "generate": set(),
    "cache_prompt": {
        "eos_token",  # ends no prompt
        *("max_kv_size", "kv_bits", "kv_group_size", "quantized_kv_start"),  # mlx-lm's caches are its command's
    },
    "chat": {
        *("xtc_probability", "xtc_threshold", "max_kv_size"),
        "pipeline",  # as for the server
    },
    "server": {
        "use_default_chat_template",
        "prompt_cache_size",  # bytes are the limit: short prompts would displace long ones
        *("kv_bits", "kv_group_size", "quantized_kv_start"),  # caches that cannot be batched
        "pipeline",
    },
}
DIFFERENT = {
    "generate": {
        "prompt": {"default"},  # mlx-lm's is "hello"; ours reads standard input
        "verbose": {"type"},  # a copy, compared below
        "temp": {"type"},  # mlx-lm's divides by numbers that are too small
        "chat_template_config": {"type", "default"},  # None, and text that is parsed later
    },
    "cache_prompt": {
        "model": {"default"},  # the embedded one
        "prompt": {"option_strings", "required"},  # also -p; ours reads standard input
    },
    "chat": {
        "model": {"default"},
        "max_tokens": {"default"},  # 512
        "prefill_step_size": {"default"},  # 512: Ctrl-C is noticed between steps
        "temp": {"type", "default"},  # None: the model's generation_config.json has the defaults
        "top_p": {"default"},
    },
    "server": {
        "allowed_origins": {"type", "default"},  # mlx-lm lets every web page call
        "chat_template": {"default"},  # None, not ""
        "chat_template_args": {"type"},  # json.loads takes what is no object
        "prompt_cache_bytes": {"type"},  # mlx-lm's takes a negative size
        "temp": {"type", "default"},  # as for the chat
        "prefill_step_size": {"default"},  # measured
        "max_tokens": {"default"},  # None: what the context leaves
        **{name: {"default"} for name in ("top_p", "top_k", "min_p")},
    },
}
PARTS = ("option_strings", "type", "default", "nargs", "choices", "const", "required")


def options(parser):
    return {action.dest: action for action in parser._actions if action.dest != "help"}


@pytest.fixture
def mlx_lms_flags(monkeypatch):
    """The flags of `mlx_lm.COMMAND`, taken where its main reads them."""

    def flags(command):
        parsers = []

        def catch(parser, *_):
            parsers.append(parser)
            raise SystemExit

        with monkeypatch.context() as patch:
            patch.setattr(argparse.ArgumentParser, "parse_args", catch)
            with pytest.raises(SystemExit):
                import_module(f"mlx_lm.{command}").main()
        return options(parsers[0])

    return flags


@pytest.mark.parametrize("command", ABSENT)
def test_flags_of_mlx_lm_are_the_same_here(mlx_lms_flags, command):
    theirs, ours = mlx_lms_flags(command), options(import_module(f"mlx_tq.{command}").build_parser())
    assert set(theirs) - set(ours) == ABSENT[command]
    found = {}
    for name in theirs.keys() & ours.keys():
        mine, other = ours[name], theirs[name]
        parts = {part for part in PARTS if getattr(mine, part) != getattr(other, part)}
        if {mine.type, other.type} == {str, None}:  # the same to argparse
            parts.discard("type")
        found |= {name: parts} if parts else {}
    assert found == DIFFERENT[command]


@pytest.mark.parametrize("word", ["False", "false", "F", "f", "FALSE", "True", "T", "0", "no", ""])
def test_verbose_is_read_as_mlx_lm_reads_it(mlx_lms_flags, word):
    ours = options(import_module("mlx_tq.generate").build_parser())["verbose"]
    assert ours.type(word) == mlx_lms_flags("generate")["verbose"].type(word)


def leaves(command):
    """The parsers of a command: its own, or those of its subcommands."""
    parser = import_module(f"mlx_tq.{command}").build_parser()
    nested = [action.choices.values() for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [leaf for parsers in nested for leaf in parsers] or [parser]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_has_a_help_text_with_its_default(command):
    for parser in leaves(command):
        for action in (a for group in parser._action_groups for a in group._group_actions if a.dest != "help"):
            text = parser._get_formatter()._expand_help(action)
            assert text, action
            assert ("(default:" in text) == (not action.required and action.nargs != 0), text
            assert "None" not in text


def test_eviction_has_one_default_budget(cli):
    """The demo's help says why it has another."""
    budgets = {re.search(r"--kv-budget BUDGET .*?\(default: (.+?)\)", " ".join(cli(*words).out.split()))[1]
               for words in (("generate", "--help"), ("chat", "--help"), ("bench", "--help"))}  # fmt: skip
    assert budgets == {config.EvictConfig().budget} == {config.PROFILES["long"].evict.budget}
    help_text = " ".join(cli("demo", "--help").out.split())
    assert "--budget BUDGET what eviction keeps; less than elsewhere, so that it evicts the code word" in help_text


def test_help_has_the_main_flags_and_help_kv_all(cli):
    main = ["profile", "key", "value", "sinks", "window", "evict", "budget", "recall"]
    shown = [re.findall(r"^  (--[\w-]+)", cli("generate", flag).out, re.MULTILINE) for flag in ("--help", "--help-kv")]
    assert shown[0][2:12] == [*(f"--kv-{name}" for name in main), "--prefix-cache", "--rescue"]
    assert set(shown[1]) == table.OPTIONS.keys() > set(shown[0][2:12])
    for command in ("chat", "server", "cache_prompt"):
        assert "--kv-mean-bits" in cli(command, "--help-kv").out
        assert "--kv-mean-bits" not in cli(command, "--help").out


def test_defaults_are_shown_as_they_are_typed():
    parser = command_parser("x", "y")
    parser.add_argument("--share", default="50%", help="of 100 %%")
    parser.add_argument("--sizes", nargs="+", default=[1, 2], help="in order")
    parser.add_argument("--stated", help="by itself (default: the model's)")
    parser.add_argument("--switch", action="store_true", help="turn on")
    parser.add_argument("--needed", required=True, help="given")
    shown = " ".join(parser.format_help().split())
    for line in ("of 100 % (default: 50%)", "in order (default: 1 2)", "(default: the model's) ", "turn on ", "given"):
        assert line in shown
    assert shown.count("(default: ") == 3


@pytest.mark.parametrize(
    ("fields", "config_"),
    [
        (table.CONFIG_FIELDS, config.KVConfig()),
        (table.RECALL_FIELDS, config.EvictConfig()),
        (table.RESCUE_FIELDS, config.RescueConfig()),
    ],
    ids=["cache", "recall", "rescue"],
)
def test_numbers_that_the_help_gives_as_defaults_are_true(fields, config_):
    """A format is the profile's, and a size may depend on the model."""
    matches = {field: re.search(r"\(default: ([\d.]+)\)", table.OPTIONS[flag].help) for flag, field in fields.items()}
    numbers = {field: float(match[1]) for field, match in matches.items() if match}
    assert numbers
    assert numbers == {field: getattr(config_, field) for field in numbers}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_bundled_model_has_one_name(command):
    shown = " ".join(" ".join(parser.format_help() for parser in leaves(command)).split())
    assert "embedded" not in shown
    assert ("--model MODEL folder" not in shown) or "(default: needle, the bundled model)" in shown


def test_names_in_help_texts_are_those_of_the_registries():
    assert (tuple(config.PROFILES), config.DEFAULT_PROFILE) == (table.PROFILES, table.DEFAULT_PROFILE)
    assert tuple(name for name in policy_names() if name != "published") == table.POLICIES
    assert (BACKENDS, DTYPES, ON_FULL) == (table.BACKENDS, table.DTYPES, table.ON_FULL)
    assert (MODES, STATE_FORMATS) == (table.PROMPT_LOOKUP, table.STATE_FORMATS)


def test_defaults_of_stored_states_are_those_of_the_package():
    for flag, value in (("--state-format", DEFAULT_STATES.format), ("--state-step", DEFAULT_STATES.step)):
        assert table.OPTIONS[flag].help.endswith(f"(default: {value})")
    with pytest.raises(argparse.ArgumentTypeError, match="'q4' is not exact or q8"):
        table.parse_state_format("q4")
