"""Run measurements of `mlx_tq.evaluate` and of studies, each into its own JSON file.

    python -m benchmarks.quality.run [NAME ...]

It skips those with results; remove a file of benchmarks/results to repeat it. Needle and format runs resume.
"""

import subprocess
import sys
from pathlib import Path

from mlx_tq.codec.formats.base import SCALE_RULES

RESULTS = Path(__file__).resolve().parent.parent / "results"
# A needle is packed in 500 tokens with these, and they are an eighth of 768.
SMALL = "--kv-sinks 32 --kv-window 64"


def _scales(pair: str) -> str:
    return ",".join(pair.format(f"{name}:{rule}") for name in ("tq4", "tq3") for rule in SCALE_RULES)


# The profiles, and the rules that they do not use.
PROFILES = "off,safe,balanced,small"
OTHERS = "q8/tq4:matched,tq4:matched/tq4:matched,q8/tq4:ls,tq4:ls/tq4:ls"
FORMATS = "fp16,q8,tq4,tq3,tq2"
# The pairs of docs/measurements/quality.md: our own, the formats of other programs, and spectral keys.
PAIRS = (
    "q8/q8,q8/tq4,q8/tq3,q8/tq2,tq4/tq4,tq4/tq3,tq4/tq2,tq3/tq4,tq3/tq3,tq2/tq4,tq2/tq2,fp8/fp8,fp8/tq4,q8_0/q8_0,"
    "q8_0/tq4,tbq4_0/tbq4_0,tbq3_0/tbq3_0,tq3_0/tq4,tq3_0/tq3_0,tq35/tq4,tq35/tq35,tq25/tq4,tq25/tq25,q8/tq35,q8/tq25,"
    "q8/fp8,q8/tq3_0"
)
# Schedules by layer, as `python -m benchmarks.studies.spectrum` prints them for the embedded model.
LEAN = "spectral8+spectral12+spectral8+spectral10+spectral10+spectral10/tq4"
RICH = "tq4+tq4+spectral14+tq4+tq4+tq4/tq4"
SPECTRAL = f"spectral8/tq4,spectral16/tq4,spectral16_int8/tq4,{LEAN},{RICH}"
MIXED = (
    "tq4~spectral8/tq4,tq4~spectral16/tq4,tq4~tq3/tq4,tq4~tq2/tq4,q8~tq4/tq4,q8~tq3/tq4,q8~tq2/tq4,q8~spectral16/tq4"
)
PARETO = f"--length 768 --step 256 --needles 1 --needle-length 500 {SMALL}"

# Of plain keys: what formats cost by themselves. Normalized ones are in ../../docs/measurements/quality.md.
PLAIN = "--kv-normalize off"
_RUNS = {
    "scales_key": f"divergence --profiles {_scales('{}/fp16')}",
    "scales_value": f"divergence --profiles {_scales('fp16/{}')}",
    "perplexity": f"perplexity --profiles {PROFILES},{OTHERS}",
    "divergence": f"divergence --profiles {PROFILES},{OTHERS}",
    "needle": f"needle --lengths 500,1000,2000 --seeds 3 --profiles balanced,small {SMALL}",
    "needle_default": "needle --lengths 2000 --seeds 5 --profiles off,balanced,small",
    "formats": f"formats --keys {FORMATS} --values {FORMATS} --length 1024 --step 256 {SMALL}",
    "all_formats": f"formats --pairs {PAIRS} {PARETO}",
    "spectral": f"formats --pairs {SPECTRAL} {PARETO}",
    # One long step, in which 72 % of the packed tokens have the second format.
    "mixed_long": "formats --pairs tq4/tq4,tq3/tq4,q8/tq4,q8~tq4/tq4,q8~tq3/tq4,tq4~tq3/tq4,tq4~spectral16/tq4 "
    f"--kv-recent 256 --chunks 1 --length 2048 --step 1024 {SMALL}",
    "mixed": f"formats --pairs {MIXED} --kv-recent 256 {PARETO}",
    "layers": f"layers --profiles balanced,small --length 512 --step 128 {SMALL}",
    "layers_float32": f"layers --profiles balanced,small --against float32 --length 512 --step 128 {SMALL}",
    "drift": "drift --length 1024 --steps 7,32,128,512,1024 --profiles balanced,small",
}
RUNS = {name: f"{words} {PLAIN}" for name, words in _RUNS.items()}
STUDIES = ("layers", "drift")  # programs of benchmarks/studies


def command_of(name: str) -> str:
    module = "benchmarks.studies." if RUNS[name].split()[0] in STUDIES else "mlx_tq evaluate "
    return f"{module}{RUNS[name]}"


def main(names: list[str]) -> int:
    for name in names or RUNS:
        target = RESULTS / f"quality_{name}.json"
        if target.exists() and RUNS[name].split()[0] not in ("needle", "formats"):
            continue
        print(f"$ python -m {command_of(name)}", flush=True)
        code = subprocess.run([sys.executable, "-m", *command_of(name).split(), "--json", str(target)]).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
