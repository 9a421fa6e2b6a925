"""The measurements that ask questions of every cache and compare answer with answer: `reasoning`, `tools`, `ruler`."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from mlx_tq.errors import ConfigError
from mlx_tq.evaluate.arms import OFF, Arm
from mlx_tq.evaluate.paired import Answered, Sample, compare, measure_paired
from mlx_tq.evaluate.reasoning import problem_samples, read_problems
from mlx_tq.evaluate.report import Results, progress
from mlx_tq.evaluate.ruler import ruler_samples
from mlx_tq.evaluate.tables import show_compared
from mlx_tq.evaluate.tools import tool_samples

# Of each, the flags that tell its samples from others.
SETTINGS = {
    "reasoning": ("data", "shots", "samples", "seeds", "max_tokens", "temp", "step", "ignore_chat_template"),
    "tools": ("data", "shots", "samples", "tool_parser", "max_tokens", "temp", "step"),
    "ruler": ("tasks", "lengths", "samples", "max_tokens", "temp", "step"),
}


def samples_of(args: argparse.Namespace, tokenizer: Any, text: str, lengths: Sequence[int]) -> list[Sample]:
    """What the flags ask for; raises ConfigError where it cannot be made."""
    if args.measurement == "reasoning":
        chat = tokenizer.has_chat_template and not args.ignore_chat_template
        return problem_samples(
            tokenizer,
            read_problems(args.data),
            shots=args.shots,
            count=args.samples,
            seeds=args.seeds,
            chat=chat,
        )
    if args.measurement == "tools":
        return tool_samples(tokenizer, args.data, shots=args.shots, count=args.samples, parser_name=args.tool_parser)
    return ruler_samples(tokenizer, text, args.tasks.split(","), lengths, args.samples)


def check_numbers(args: argparse.Namespace) -> None:
    """Raise where a number of the flags is none that can be asked for.

    Raises:
        ConfigError: it names the flag.
    """
    for name, least in (("samples", 1), ("max_tokens", 1), ("step", 1), ("seeds", 1), ("shots", 0), ("temp", 0)):
        value = getattr(args, name, least)
        if value < least:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be {least} or more.")


def run_asked(
    args: argparse.Namespace, model: Any, tokenizer: Any, samples: list[Sample], arms: list[Arm], results: Results
) -> int:
    """Ask, keep and show; returns the exit code."""
    compressed = [arm for arm in arms if arm.name != OFF.name]
    with progress(args.measurement, (1 + len(compressed)) * len(samples)) as advance:

        def report(key: str, answered: Answered) -> None:
            if key not in results.rows:
                results.add(key, asdict(answered))
            advance(1)

        known: Callable[[str], dict[str, Any] | None] = results.rows.get
        answers = measure_paired(
            model,
            tokenizer,
            samples,
            compressed,
            max_tokens=args.max_tokens,
            temp=args.temp,
            step=args.step,
            known=known,
            report=report,
        )
    show_compared(results, args.measurement, compare(answers))
    return 0
