"""`mlx_tq.evaluate`: measure what a compressed KV cache costs in quality."""

import argparse
import os
from pathlib import Path
from typing import Any

from mlx_tq.cli.options import STDOUT, Request, check_writable, name_of, parse_json_object, parse_temperature
from mlx_tq.cli.parser import (
    CommandParser,
    add_cache_arguments,
    add_model_arguments,
    add_sampling_arguments,
    command_parser,
)
from mlx_tq.cli.runner import command_main
from mlx_tq.errors import ConfigError

# Help of each measurement, and the arms that it compares by default.
_MEASUREMENTS = {
    "perplexity": ("perplexity of a text, compared with the uncompressed cache", "off,safe,balanced,small"),
    "divergence": ("KL divergence and top-1 agreement with the uncompressed cache", "off,safe,balanced,small"),
    "trajectory": (
        "answers that each cache generates by itself, compared with the uncompressed cache's",
        "safe,balanced,small",
    ),
    "formats": ("pairs of formats: bytes, errors, divergence, perplexity", None),
    "needle": ("find a fact planted in a long text", "balanced,small"),
    "reasoning": ("word problems in GSM8K's format, compared with the uncompressed cache", "balanced,small"),
    "tools": ("function calls, compared with the uncompressed cache", "balanced,small"),
    "ruler": ("tasks over long texts like RULER's, compared with the uncompressed cache", "balanced,small"),
    "lm-eval": ("tasks of lm-eval through mlx-lm's evaluation, on a compressed cache", None),
}
_IN_FLOAT32 = ("divergence", "trajectory", "formats")  # in half precision, rounding diverges more than q8
# What `divergence` measures, and with a published protocol, where flags do not say.
_PIECES = {"--chunks": 3, "--length": 2048}
PROTOCOLS = {"fidelity": {"--chunks": 100, "--length": 512, "--kv-sinks": 0, "--kv-window": 0}}
_STEP = (512, "tokens per prefill step")
_LENGTHS: dict[str, Any] = {"default": "1000,2000", "metavar": "N,...", "help": "tokens of the prompts"}


def run(args: argparse.Namespace) -> int:
    if args.measurement == "divergence":
        set_sizes(args)
    request = Request.from_args(args)
    if args.json not in (None, STDOUT):
        check_writable("--json", args.json, "file")
    if getattr(args, "records", None) is not None:
        _check_folder("--records", args.records)

    from mlx_tq.cli.inputs import read_text
    from mlx_tq.cli.startup import check_request
    from mlx_tq.evaluate.arms import arms_of_measurement
    from mlx_tq.evaluate.flag_values import check_values

    check_values(args)
    arms = arms_of_measurement(request)
    text = read_text(getattr(args, "text", None))
    check_request(request)

    from mlx_tq.evaluate.measurements import run_measurement

    return run_measurement(request, arms, text)


def build_parser() -> CommandParser:
    parser = command_parser("evaluate", "Measure what a compressed KV cache costs in quality.", None)
    commands = parser.add_subparsers(dest="measurement", required=True, metavar="MEASUREMENT")
    parsers: dict[str, CommandParser] = {}
    for name, (description, arms) in _MEASUREMENTS.items():
        parsers[name] = commands.add_parser(name, help=description, description=description)
        add_model_arguments(parsers[name], adapter=False, dtype="float32" if name in _IN_FLOAT32 else None)
        add = parsers[name].add_argument
        if name not in ("reasoning", "tools", "lm-eval"):
            add("--text", metavar="FILE", help="text to evaluate (default: an excerpt of WikiText-2's test split)")
        add("--json", metavar="FILE", help="write the results as JSON; - is stdout (default: a table only)")
        if arms is not None:
            add_arm_arguments(parsers[name], arms)
        add_cache_arguments(parsers[name])
    for name in ("perplexity", "formats"):
        _add_numbers(parsers[name], chunks=(3, "pieces of the text"), length=(2048, "tokens per piece"), step=_STEP)
    chunks, length = (None, "pieces of the text (default: 3)"), (None, "tokens per piece (default: 2048)")
    _add_numbers(parsers["divergence"], chunks=chunks, length=length, step=_STEP)
    _add_protocol(parsers["divergence"])
    text = "write a record of each cache into this folder, for mlx-kld compare and mlx-kld plot (default: none)"
    parsers["divergence"].add_argument("--records", metavar="FOLDER", help=text)
    pieces = {"chunks": (8, "number of prompts, cut from the text"), "length": (1024, "tokens per prompt")}
    answer_numbers = {"answer_tokens": (256, "tokens per answer"), "seed": (0, "random seed")}
    _add_numbers(parsers["trajectory"], **pieces, **answer_numbers, step=_STEP)
    _add_temperature(parsers["trajectory"])
    add = parsers["formats"].add_argument
    keys = "key formats, such as tq4 or tq4:raw, separated by commas (default: tq4 with --values)"
    add("--keys", metavar="A,B,...", help=keys)
    add("--values", metavar="A,B,...", help="value formats; all pairs are measured (default: tq4 with --keys)")
    add("--pairs", metavar="A/B,...", help="pairs such as q8/tq4,tq35/tq3 (default: a curated list of pairs)")
    needles = {"needles": (0, "needles at each of three depths"), "needle_length": (1000, "tokens around a needle")}
    _add_numbers(parsers["formats"], **needles)
    add = parsers["needle"].add_argument
    add("--lengths", **_LENGTHS)
    depths = "positions of the needles: start, middle, end or 0 to 1"
    add("--depths", default="start,middle,end", metavar="A,...", help=depths)
    answers = (64, "maximum tokens per answer")
    _add_numbers(parsers["needle"], seeds=(3, "cases for each length and depth"), step=_STEP, max_tokens=answers)
    add("--strict", action="store_true", help="exit with 1 if a compressed cache misses a needle")
    _add_questions(parsers["reasoning"], parsers["tools"], parsers["ruler"])
    _add_lm_eval(parsers["lm-eval"])
    return parser


def _add_protocol(parser: argparse.ArgumentParser) -> None:
    flags = " ".join(f"{flag} {value}" for flag, value in PROTOCOLS["fidelity"].items())
    text = "a published protocol; fidelity is that of mlx-quant-fidelity, which packs each token before attention "
    text += f"reads it, and sets {flags} unless they are given (default: none)"
    parser.add_argument("--protocol", choices=tuple(PROTOCOLS), help=text)


def set_sizes(args: argparse.Namespace) -> None:
    """Set the flags of a protocol, or the default sizes, where no flag is typed."""
    for flag, value in PROTOCOLS.get(args.protocol, _PIECES).items():
        if getattr(args, name_of(flag)) is None:
            setattr(args, name_of(flag), value)


def _check_folder(flag: str, name: str) -> None:
    folder = Path(name)
    parent = folder if folder.exists() else folder.resolve().parent
    if not parent.is_dir():
        raise ConfigError(f"{flag} {name} is neither a folder nor in one. Name a folder, which is made if it is new.")
    if not os.access(parent, os.W_OK):
        raise ConfigError(f"{flag} {name} cannot be written: {parent} allows no new files. Name another folder.")


def add_arm_arguments(parser: argparse.ArgumentParser, default: str) -> None:
    """Add --profiles; `default` is compared without it and without flags of the cache."""
    parser.add_argument(
        "--profiles",
        metavar="A,B,...",
        help="profiles or KEY/VALUE pairs to compare, such as q8/tq4. Suffixes: tq4:raw (scale rule), tq4:plain (no "
        f"key normalization), @90%% (evict to this budget) (default: {default}, or the --kv flags)",
    )
    parser.set_defaults(default_profiles=default)


def _add_numbers(parser: argparse.ArgumentParser, **numbers: tuple[int | None, str]) -> None:
    """Add whole numbers by name, each with its default and its help."""
    for name, (default, text) in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, metavar="N", help=text)


def _add_questions(
    reasoning: argparse.ArgumentParser, tools: argparse.ArgumentParser, ruler: argparse.ArgumentParser
) -> None:
    data = "JSON lines with question and answer, in GSM8K's format"
    reasoning.add_argument("--data", required=True, metavar="FILE", help=data)
    reasoning.add_argument("--ignore-chat-template", action="store_true", help="prompt without the chat template")
    tools.add_argument("--data", metavar="FILE", help="functions and cases (default: those inside the package)")
    tools.add_argument(
        "--tool-parser",
        metavar="NAME",
        help="a tool parser of mlx-lm, such as json_tools, for a model whose template does not support functions "
        "(default: the model's own)",
    )
    ruler.add_argument("--tasks", default="needles,variables,common,frequent", metavar="A,...", help="tasks to run")
    ruler.add_argument("--lengths", **_LENGTHS)
    _add_numbers(reasoning, shots=(5, "worked problems in the prompt"), seeds=(1, "orders of the worked problems"))
    _add_numbers(tools, shots=(0, "example cases in the prompt"))
    for parser, samples, tokens in ((reasoning, 100, 512), (tools, 100, 200), (ruler, 5, 80)):
        text = "samples of each task and length" if parser is ruler else "maximum number of samples"
        numbers = {"samples": (samples, text), "max_tokens": (tokens, "maximum tokens per answer"), "step": _STEP}
        _add_numbers(parser, **numbers)
        _add_temperature(parser)


def _add_temperature(parser: argparse.ArgumentParser) -> None:
    text = "sampling temperature; 0 is greedy"
    parser.add_argument("--temp", type=parse_temperature, default=0.0, metavar="T", help=text)


def _add_lm_eval(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `mlx_lm.evaluate`, with its names and defaults."""
    add = parser.add_argument
    add("--tasks", nargs="+", required=True, metavar="TASK", help="tasks of lm-eval, such as arc_easy")
    _add_numbers(parser, batch_size=(8, "sequences per batch"), seed=(123, "random seed"))
    for flag, text in (("--num-shots", "number of shots"), ("--limit", "maximum number of samples per task")):
        add(flag, type=int, metavar="N", help=f"{text} (default: the task's)")
    add("--max-tokens", type=int, metavar="N", help="maximum tokens to generate (default: the task's)")
    add("--fewshot-as-multiturn", action="store_true", help="give few-shot examples as turns of a conversation")
    add(
        "--apply-chat-template",
        action=argparse.BooleanOptionalAction,
        help="use the chat template; by default, if the model has one",
    )
    add(
        "--chat-template-args",
        type=parse_json_object,
        default={},
        metavar="JSON",
        help="arguments of the chat template",
    )
    add("--confirm-run-unsafe-code", action="store_true", help="allow tasks that execute untrusted code")
    add_sampling_arguments(parser)


main = command_main(build_parser, run)
