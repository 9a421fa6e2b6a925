"""Measure what each part of TurboQuant is worth, on the embedded model's own keys and values.

python benchmarks/quality/ablation.py changes one thing at a time, first of the keys alone, then of the values; the
other side stays fp16. It resumes ../results/quality_ablation.json. docs/measurements/quality.md has the table.
"""

from dataclasses import asdict
from pathlib import Path

from variants import BITS, CHANGES, FORMATS

from mlx_tq.cli.needles.haystack import load_text
from mlx_tq.codec import register_format
from mlx_tq.evaluate.arms import parse_arm
from mlx_tq.evaluate.formats import measure_formats
from mlx_tq.evaluate.passes import cut_chunks
from mlx_tq.evaluate.report import Results
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
# A mean and a scale of each dim are for keys, whose dims differ; what they cost a value is known from these.
KEYS_ONLY = {"mean removed", "dims scaled"}


def pairs() -> list[str]:
    """Keys with fp16 values, then values with fp16 keys."""
    names = [f"{name}.{bits}" for bits in BITS for name in CHANGES]
    values = [name for name in names if name.rpartition(".")[0] not in KEYS_ONLY]
    return [*(f"{name}/fp16" for name in names), *(f"fp16/{name}" for name in values)]


def main() -> None:
    """Measure what has no result yet, and print the table."""
    for variant in FORMATS:
        register_format(variant)
    results = Results(str(TARGET), "ablation", SETTINGS, resume=True)
    model, tokenizer = load()
    chunks = cut_chunks(tokenizer, load_text(), SETTINGS["chunks"], SETTINGS["length"])
    arms = [parse_arm(name, sinks=SETTINGS["sinks"], window=SETTINGS["window"]) for name in pairs()]
    left = [arm for arm in arms if arm.name not in results.rows]
    for row in measure_formats(model, chunks, left, SETTINGS["step"]):
        results.add(row.name, asdict(row))
    lines = [
        (
            name,
            f"{row['key_error'] + row['value_error']:.5f}",
            f"{row['cosine']:.5f}",
            f"{row['kld']:.6f}",
            f"{row['kld_error']:.6f}",
            f"{row['top1']:.2f}",
        )
        for name, row in results.rows.items()
    ]
    results.show("One change at a time", ("K/V", "error", "cosine", "KLD", "+-", "top-1 %"), lines)


if __name__ == "__main__":
    main()
