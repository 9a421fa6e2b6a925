"""Measure what each part of TurboQuant contributes, on the keys and values of the embedded model.

python benchmarks/quality/ablation.py changes one thing at a time, first for keys, then for values; the
other side stays fp16. It resumes ../results/quality_ablation.json. docs/measurements/quality.md has the table.
"""

from pathlib import Path

from variants import BITS, CHANGES, FORMATS

from mlx_tq.cli.haystack import load_text
from mlx_tq.codec import register_format
from mlx_tq.evaluate.arms import parse_arm
from mlx_tq.evaluate.formats import measure_formats
from mlx_tq.evaluate.results import Results
from mlx_tq.evaluate.teacher_forced import cut_chunks
from mlx_tq.models import load

TARGET = Path(__file__).resolve().parent.parent / "results" / "quality_ablation.json"
SETTINGS = {
    "model": "embedded",
    "text": "embedded",
    "chunks": 2,
    "length": 512,
    "step": 256,
    "sinks": 32,
    "window": 64,
}
# A mean and a scale per dim are for keys, whose dims differ.
KEYS_ONLY = {"mean removed", "dims scaled"}


def pairs() -> list[str]:
    names = [f"{name}.{bits}" for bits in BITS for name in CHANGES]
    values = [name for name in names if name.rpartition(".")[0] not in KEYS_ONLY]
    return [*(f"{name}/fp16" for name in names), *(f"fp16/{name}" for name in values)]


def main() -> None:
    for variant in FORMATS:
        register_format(variant)
    results = Results(str(TARGET), "ablation", SETTINGS, resume=True)
    model, tokenizer = load()
    chunks = cut_chunks(tokenizer, load_text(), SETTINGS["chunks"], SETTINGS["length"])
    arms = [parse_arm(name, sinks=SETTINGS["sinks"], window=SETTINGS["window"]) for name in pairs()]
    missing = [arm for arm in arms if arm.name not in results.rows]
    for row in measure_formats(model, chunks, missing, SETTINGS["step"]):
        results.add(row["name"], row)
    columns = {
        "K/V": lambda row: row["name"],
        "error": lambda row: f"{row['key_error'] + row['value_error']:.5f}",
        "cosine": lambda row: f"{row['cosine']:.5f}",
        "KLD": lambda row: f"{row['kld']:.6f}",
        "± KLD": lambda row: f"{row['kld_error']:.6f}",
        "top-1 %": lambda row: f"{row['top1']:.2f}",
    }
    results.show("One change at a time", columns, list(results.rows.values()))


if __name__ == "__main__":
    main()
