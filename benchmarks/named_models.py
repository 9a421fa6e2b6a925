"""The models that benches load by name, and a report with rows of each."""

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mlx_tq import load
from mlx_tq.cli.environment import environment

RESULTS = Path(__file__).parent / "results"
NAMES = {"embedded": "the embedded model", "smollm2": "SmolLM2-135M-Instruct"}
# How its file is made: benchmarks/models/README.md
GEMMA = "gemma-3-270m.gguf"
ALL_NAMES = {**NAMES, GEMMA: "Gemma 3 270M"}


def named_model(name: str) -> tuple[Any, Any]:
    """Load one of `NAMES`, or a GGUF file, in dense float32."""
    return load(None if name == "embedded" else name, dtype="float32", dequantize=name != "embedded")


def survey_models(
    about: str,
    module: str,
    source: str,
    rows_of: Callable[[str], Iterable[dict[str, Any]]],
    names: Iterable[str] = NAMES,
) -> None:
    """Measure the models of the command line, print their rows, and write them to a file of benchmarks/results."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--models", default=",".join(names), help="of these, joined by commas")
    args = parser.parse_args()
    rows = []
    for name in args.models.split(","):
        for row in rows_of(name):
            print(row, flush=True)
            rows.append(row)
    report = {"command": f"python -m {module} --models {args.models}", "environment": environment(), "rows": rows}
    (RESULTS / source).write_text(json.dumps(report, indent=1) + "\n")
