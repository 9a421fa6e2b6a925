"""Run the sweep of results/quality_sweep.json in parts, each a run of benchmarks.studies.sweep.

    python -m benchmarks.studies.eviction_sweep [PART ...] [--seeds N]

It runs the cells that the file lacks, after a calibration on questions if the current folder has no
questions.safetensors. TriAttention takes the maximum over heads (aggregation `paper`), the default when this was
measured. The embedded model computes in float32, six times as fast with OpenBLAS.
"""

import argparse
import subprocess
import sys
from pathlib import Path

JSON = Path(__file__).resolve().parent.parent / "results" / "quality_sweep.json"
STATS = Path("questions.safetensors")
SELF = "published:calibration=text"
QUESTIONS = f"published:calibration={STATS}"
V1, V1_QUESTIONS = "published:calibration=text:mode=v1", f"published:mode=v1:calibration={STATS}"
V2 = "published:calibration=text:mode=v2"
HIGHEST = f"{SELF}:evict=highest"
OTHERS = f"{QUESTIONS}:aggregation=v3,expected_attention:calibration={STATS}"
MAIN = f"{SELF},{QUESTIONS},{HIGHEST},{V1},{V1_QUESTIONS},random"
# What changes while a text is read, and how the worst are chosen.
LATER = f"{SELF}:ema=0.1,{SELF}:recalibrate=256"
SEGMENTS = ",".join(
    policy
    for option in ("segments=1", "segment_tokens=64")
    for policy in (f"{SELF}:{option}", f"published:{option}:calibration={STATS}")
)
ALL = f"{MAIN},{V2},recency,knorm,{OTHERS}"

# Prefix and window take an eighth of the shortest context.
COMMON = "--dtype float32 --kv-window 64 --warmup 256 --max-tokens 24"
RETENTIONS = "95,90,85,80,75,65,50,25,10"
FEW = "90,75,50"
TEXT = "--chunks 3 --length 1000 --seeds 0"
MULTI = "--chunks 0 --lengths 800 --depths middle --kinds multi"
ONCE = f"{MULTI} --once"

PARTS = {
    # Needles of all policies, and what the text loses.
    "needles": f"--policies {ALL} --budgets {RETENTIONS} {ONCE}",
    "text": f"--policies {SELF},{QUESTIONS},{HIGHEST},{V1},random --budgets {RETENTIONS} {TEXT}",
    "rounds": f"--policies {MAIN},{LATER} --budgets {FEW} {MULTI}",
    "kinds": f"--policies {SELF},{QUESTIONS},random --budgets {FEW} --chunks 0 --lengths 800 "
    "--kinds single,paraphrased,decoys --once",
    # Options.
    "blocks": f"--policies {SELF},{QUESTIONS},random --budgets {FEW} --granularities 8,16,32,64 {ONCE}",
    "segments": f"--policies {SEGMENTS} --budgets {FEW} {ONCE}",
    "prefixes": f"--policies {SELF},{QUESTIONS},random --budgets {FEW} --sinks 0,16,32 {ONCE}",
    # Where the sinks holds the sinks, `streaming` is `recency`.
    "sinks": f"--policies recency,streaming --budgets {FEW} --sinks 0,32 {ONCE}",
    # 2,048 tokens above a budget of 25 % are there from 2,731 tokens on.
    "triggers": f"--policies {SELF},random --budgets 25 --triggers 32,128,512,2048 --chunks 1 --length 3000 --seeds 0",
    "text_others": f"--policies {V2},{V1_QUESTIONS},recency,knorm,{OTHERS} --budgets {FEW} {TEXT}",
    "text_options": f"--policies {SEGMENTS},{LATER} --budgets 75 {TEXT}",
    "text_prefixes": f"--policies {SELF} --budgets 75 --sinks 0,16,32 {TEXT}",
    "text_blocks": f"--policies {SELF},{QUESTIONS} --budgets 75 --granularities 16,64 {TEXT}",
    "long": f"--policies {SELF},{QUESTIONS},{V1},{V1_QUESTIONS},random --budgets {FEW} --chunks 0 "
    "--lengths 2000 --depths middle --kinds multi --once",
}


def as_measured(policy: str) -> str:
    """Return a policy as its cells are named."""
    named = "aggregation" in policy or not policy.startswith("published")
    return policy if named else f"{policy}:aggregation=paper"


def run(*words: str) -> None:
    print(f"$ python -m {' '.join(words)}", flush=True)
    code = subprocess.run([sys.executable, "-m", *words]).returncode
    if code:
        sys.exit(code)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART")
    parser.add_argument("--seeds", type=int, default=3, help="scenes for each kind, length and depth")
    args = parser.parse_args()
    if not STATS.exists():
        run("mlx_tq", "calibrate", "--text-share", "0", "--dtype", "float32", "--covariance", "-o", str(STATS))
    for part in args.parts or PARTS:
        words = f"{COMMON} --sinks 32 --triggers 32 --seeds {args.seeds} {PARTS[part]}".split()
        policies = words.index("--policies") + 1
        words[policies] = ",".join(map(as_measured, words[policies].split(",")))
        run("benchmarks.studies.sweep", *words, "--json", str(JSON))


if __name__ == "__main__":
    main()
