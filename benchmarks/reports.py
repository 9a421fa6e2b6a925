"""Models by name, and reports in benchmarks/results."""

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mlx_tq import load
from mlx_tq.cli.diagnostics import environment

RESULTS = Path(__file__).parent / "results"
NAMES = {"embedded": "needle", "smollm2": "SmolLM2-135M-Instruct"}
GEMMA = "gemma-3-270m.gguf"  # benchmarks/models/README.md says how its file is made
ALL_NAMES = {**NAMES, GEMMA: "Gemma 3 270M"}


def named_model(name: str) -> tuple[Any, Any]:
    """Load one of `NAMES`, or a GGUF file, in dense float32."""
    model, tokenizer = load(None if name == "embedded" else name, dtype="float32", dequantize=name != "embedded")
    return model, tokenizer


def save(name: str | Path, command: str, **fields: Any) -> None:
    """Write a report, with its command and the machine, to a file or by its name into benchmarks/results."""
    report = {"command": command, "environment": environment(), **fields}
    (RESULTS / name).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def survey_models(
    about: str,
    module: str,
    source: str,
    rows_of: Callable[[str], Iterable[dict[str, Any]]],
    names: Iterable[str] = ALL_NAMES,
) -> None:
    """Measure the models of the command line, print their rows, and write them to a file of benchmarks/results."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("--models", default=",".join(names), help="of these, joined by commas")
    args = parser.parse_args()
    rows = []
    for name in args.models.split(","):
        for row in rows_of(name):
            print(row, flush=True)
            rows.append(row)
    save(source, f"python -m {module} --models {args.models}", rows=rows)
