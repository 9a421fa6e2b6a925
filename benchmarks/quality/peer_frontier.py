"""Compare our formats with those of published KV caches, and with fewer bits in dims that queries ignore, as formulas.

    python -m benchmarks.quality.peer_frontier --model M --text FILE --calibration FILE --json FILE [--arms "NAME;..."]

All arms share sinks, window and steps, and are rounded in floats (see `rounded_cache`), so that only codes differ. The
calibration text must not be the judged one. A file of results is resumed. Records hold the divergence by blocks of 64
tokens, from which `compare` computes errors of ratios: tokens of a block are not independent.
"""

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks.quality import peers
from benchmarks.quality.frontier import FORMATS
from benchmarks.quality.ratios import clusters_of_blocks, compare, interpolate
from benchmarks.quality.rounded_cache import BLOCK, SINKS, STEP, WINDOW, Formula, LayerRows, Reader
from benchmarks.quality.sorted_pairs import (
    LayerStatistics,
    MixedValues,
    SortedKeys,
    calibrate,
    format_bits,
    lloyd_codeword,
    sorted_formula,
    store_with,
    trellis_codeword,
)
from mlx_tq.codec import get_format, register_format
from mlx_tq.config import KVConfig
from mlx_tq.errors import ConfigError
from mlx_tq.evaluate.results import Record, Results
from mlx_tq.evaluate.standard_error import standard_error
from mlx_tq.evaluate.teacher_forced import cut_chunks
from mlx_tq.models import load
from mlx_tq.prompt_cache.compressed import plan_caches

Statistics = Callable[[], list[LayerStatistics]]

TOGETHER = 4  # arms that share the logits of the exact cache
ERROR_BLOCK = 64  # tokens that count as one observation
CALIBRATION = (8, 2048)  # texts, and tokens of each
LAYER_BITS = (2.6, 3, 3.4, 3.8, 4.3)
PEERS = ("KVarN", "OSCAR", "OScaR", "KIVI")
_BY_LAYER = " bits by layer"
INTEGERS = ("q8_0", "q4_0", "affine4_64", "affine3_64", "affine2_64")


def package_formula(name: str) -> Formula:
    """Return formats of the package for keys, which are normalized, and values."""
    key, value = map(get_format, name.split("/"))
    return Formula(
        name,
        store_with(key, keys=True, normalized=True),
        store_with(value, keys=False),
        lambda heads, dim: (format_bits(key, dim) + 16 / BLOCK, format_bits(value, dim)),
    )


def integer_formula(name: str) -> Formula:
    fmt = get_format(name)
    return Formula(
        name,
        store_with(fmt, keys=True),
        store_with(fmt, keys=False),
        lambda heads, dim: (format_bits(fmt, dim),) * 2,
    )


def layer_formula(model: Any, mean_bits: float) -> Formula:
    """Return the formats that the package chooses by layer."""
    layers = plan_caches(model, KVConfig(mean_bits=mean_bits, sinks=SINKS, window=WINDOW)).layers
    pairs = [(get_format(layer.spec.key), get_format(layer.spec.value)) for layer in layers]

    def side(rows: LayerRows, *, keys: bool) -> mx.array:
        return store_with(pairs[rows.number][not keys], keys=keys, normalized=keys)(rows)

    def bits(heads: int, dim: int) -> tuple[float, float]:
        key, value = (np.mean([format_bits(fmt, dim) for fmt in formats]) for formats in zip(*pairs, strict=True))
        return float(key) + 16 / BLOCK, float(value)

    return Formula(f"{mean_bits:g}{_BY_LAYER}", partial(side, keys=True), partial(side, keys=False), bits)


def sorted_formulas(statistics: Statistics) -> list[Formula]:
    """Return the arms of sorted pairs. Two numbers are the mean bits of keys and of values."""
    first, known = (partial(SortedKeys, source, codeword=trellis_codeword) for source in (None, statistics))
    mixed = partial(MixedValues, codeword=trellis_codeword)
    plain = partial(SortedKeys, None, codeword=lloyd_codeword)
    arms: list[tuple[str, SortedKeys, str | MixedValues]] = []
    for bits in (2, 3, 4):
        arms += [
            (f"sorted tcq{bits}", first(4 * bits), f"tcq{bits}"),
            (f"sorted tcq{bits}, block weights", first(4 * bits, by_block=True), f"tcq{bits}"),
            (f"sorted tcq{bits}, calibrated", known(4 * bits), f"tcq{bits}"),
            (f"sorted tq{bits}", plain(4 * bits), f"tq{bits}"),
        ]
    arms += [
        ("sorted tcq2, calibrated, block weights", known(8, by_block=True), "tcq2"),
        ("sorted tcq2, covariance", known(8, shrinkage=0.1), "tcq2"),
        ("sorted tcq2, widths 3 2 2 1", first(8, fixed=(3, 2, 2, 1)), "tcq2"),
        ("sorted tcq2, centered values", first(8), mixed((2, 2, 2, 2), centered=True)),
        ("groups of tcq2, all of 2 bits", first(8, fixed=(2, 2, 2, 2)), "tcq2"),
        ("sorted tcq, 2.25/1.75", first(9), mixed((2, 2, 2, 1))),
    ]
    return [
        sorted_formula(name, keys, get_format(values) if isinstance(values, str) else values)
        for name, keys, values in arms
    ]


def peer_formulas(statistics: Statistics) -> list[Formula]:
    return [
        *(peers.kvarn(bits) for bits in (2, 3, 4)),
        peers.oscar_covariance(2, lambda: [layer.oscar for layer in statistics()]),
        peers.oscar_tokens(2, 128),
        peers.oscar_tokens(2, 32),
        *(peers.kivi(bits) for bits in (2, 3, 4)),
    ]


def make_formulas(model: Any, statistics: Statistics, names: Sequence[str]) -> list[Formula]:
    """Return the arms of these names, in their order; of all names if there are none."""
    for each in FORMATS:
        register_format(each)
    formulas = [
        *(package_formula(f"{kind}tcq{bits}/tcq{bits}") for bits in (2, 3, 4) for kind in ("", "s")),
        *(package_formula(f"tq{bits}/tq{bits}") for bits in (2, 3, 4)),
        *peer_formulas(statistics),
        *sorted_formulas(statistics),
        *map(integer_formula, INTEGERS),
    ]
    if not names or any(name.endswith(_BY_LAYER) for name in names):  # needs the losses of layers
        formulas += [layer_formula(model, bits) for bits in LAYER_BITS]
    known = {formula.name: formula for formula in formulas}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"arms {unknown} are unknown; valid are {'; '.join(known)}.")
    return [known[name] for name in names or known]


def measure(reader: Reader, ids: mx.array, exact: mx.array, formulas: Sequence[Formula]) -> list[np.ndarray]:
    """Return of each formula the divergence and the agreement of each block of one text: [2, blocks]."""
    states = [reader.rounded(ids, formula) for formula in formulas]
    starts = range(0, ids.shape[1] - STEP, ERROR_BLOCK)
    return [
        np.array([[part[start : start + ERROR_BLOCK].mean() for start in starts] for part in pair])
        for pair in reader.compare(exact, states)
    ]


def make_record(reader: Reader, formula: Formula, length: int, blocks: np.ndarray, texts: int) -> Record:
    """Return the record of blocks [2, blocks] of all texts; the last block of a text lacks one token."""
    sides = np.mean([formula.bits(slot.heads, slot.key_dim) for slot in reader.slots], axis=0)
    whole, bits = SINKS + WINDOW + formula.tail, float(sides.mean())
    return {
        "name": formula.name,
        "key_bits": float(sides[0]),
        "value_bits": float(sides[1]),
        "bits": bits,
        "bits_of_text": (bits * (length - whole) + 16 * whole) / length,
        "texts": texts,
        "kld": float(blocks[0].mean()),
        "kld_error": standard_error(blocks[0], clusters_of_blocks(texts, blocks.shape[1])),
        "top1": 100 * float(blocks[1].mean()),
        "blocks": [float(f"{mean:.6g}") for mean in blocks[0]],
        "agreement": [round(float(mean), 4) for mean in blocks[1]],
    }


def peer_at(records: Mapping[str, Record], bits: float) -> float:
    """Return the least divergence of the peers at a number of bits."""
    families = ([row for name, row in records.items() if name.startswith(family)] for family in PEERS)
    return min((interpolate(rows, bits) for rows in families if rows), default=math.inf)


def show(results: Results) -> None:
    base = results.rows.get("tcq2/tcq2")
    columns: dict[str, Callable[[Record], str]] = {
        "cache": lambda row: str(row["name"]),
        "bits": lambda row: f"{row['bits']:.3f}",
        "texts": lambda row: str(row["texts"]),
        "bits of text": lambda row: f"{row['bits_of_text']:.2f}",
        "KLD": lambda row: f"{row['kld']:.5f}",
        "± KLD": lambda row: f"{row['kld_error']:.5f}",
        "top-1 %": lambda row: f"{row['top1']:.2f}",
        "of tcq2/tcq2": lambda row: "{:.3f} ± {:.3f}".format(*compare(row, base)) if base else "-",
        "of the best peer": lambda row: f"{row['kld'] / peer_at(results.rows, row['bits']) or math.nan:.3f}",
    }
    rows = sorted(results.rows.values(), key=lambda row: float(row["bits"]))
    results.show("Divergence of formulas from the exact cache", columns, rows)


def read_statistics(reader: Reader, tokenizer: Any, path: str) -> list[LayerStatistics]:
    texts = cut_chunks(tokenizer, Path(path).read_text(encoding="utf-8"), *CALIBRATION)
    return calibrate(reader, [mx.array([text]) for text in texts])


def run(args: argparse.Namespace, results: Results) -> None:
    """Measure the arms on one text after the other, and add to the records that lack a text."""
    model, tokenizer = load(args.model, dtype="float32", dequantize=True)
    reader = Reader(model)
    statistics = cache(partial(read_statistics, reader, tokenizer, args.calibration))
    chosen = make_formulas(model, statistics, args.arms.split(";") if args.arms else [])
    chunks = cut_chunks(tokenizer, Path(args.text).read_text(encoding="utf-8"), args.texts, args.length)
    for number, chunk in enumerate(chunks):
        ids, exact = mx.array([chunk[:-1]]), None
        missing = [f for f in chosen if results.rows.get(f.name, {}).get("texts", 0) == number]
        for start in range(0, len(missing), TOGETHER):
            exact = reader.exact(ids) if exact is None else exact
            formulas = missing[start : start + TOGETHER]
            for formula, blocks in zip(formulas, measure(reader, ids, exact, formulas), strict=True):
                known = results.rows.get(formula.name, {"blocks": [], "agreement": []})
                joined = np.concatenate([np.array([known["blocks"], known["agreement"]]), blocks], axis=1)
                results.add(formula.name, make_record(reader, formula, args.length, joined, number + 1))
            print(", ".join(formula.name for formula in formulas), "on text", number + 1, file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "text", "calibration", "json"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--texts", type=int, default=2, help="pieces of the text")
    parser.add_argument("--length", type=int, default=2048, help="tokens per piece")
    parser.add_argument("--arms", help="some of the arms, joined by semicolons")
    args = parser.parse_args()
    settings = {"model": Path(args.model).name, "text": Path(args.text).name, "length": args.length}
    settings |= {"calibration": Path(args.calibration).name, "calibration_tokens": math.prod(CALIBRATION)}
    settings |= {"step": STEP, "sinks": SINKS, "window": WINDOW, "dtype": "float32"}
    results = Results(args.json, "peer_frontier", settings, resume=True)
    run(args, results)
    show(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
