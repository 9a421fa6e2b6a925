"""Measure what docs/quality.md reports: one `mlx_tq.evaluate` command after another, each with its JSON.

python benchmarks/quality/run.py [NAME ...] runs those that have no results yet; remove a file of ../results to repeat
it. Needle and format runs resume where they stopped.
"""

import subprocess
import sys
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "results"
# Prefix plus window at most an eighth of a context of 1,000, and what lets a needle be packed in one of 500.
SMALL = "--kv-prefix 32 --kv-window 64"

RUNS = {
    "scales_key": "divergence --profiles "
    + ",".join(f"{name}:{rule}/fp16" for name in ("tq4", "tq3") for rule in ("raw", "matched", "ls")),
    "scales_value": "divergence --profiles "
    + ",".join(f"fp16/{name}:{rule}" for name in ("tq4", "tq3") for rule in ("raw", "matched", "ls")),
    "needle": f"needle --lengths 500,1000,2000 --seeds 5 --profiles balanced,small {SMALL}",
    "perplexity": "perplexity",
    "divergence": "divergence",
    "formats": "formats",
    "drift": "drift --profiles balanced,small",
    "needle_long": f"needle --lengths 3000,3500 --seeds 2 --profiles balanced,small {SMALL}",
}


def main(names: list[str]) -> int:
    """Run the named measurements, or all; returns the first exit code that is not 0."""
    for name in names or RUNS:
        target = RESULTS / f"quality_{name}.json"
        words = RUNS[name].split()
        if target.exists() and words[0] not in ("needle", "formats"):
            continue
        print(f"$ python -m mlx_tq evaluate {RUNS[name]}", flush=True)
        code = subprocess.run([sys.executable, "-m", "mlx_tq", "evaluate", *words, "--json", str(target)]).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
