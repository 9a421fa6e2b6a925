"""What trellis codes would cost: lane operations of sketches on the simulator, or their times on a GPU.

    python -m benchmarks.trellis.costs

It writes ../results/trellis_counted.json, or trellis_cuda.json or trellis_metal.json. Without a GPU each sketch is also
held to mlx's operations; on one it is timed, and the matrices of a layer of Llama 3 8B beside it.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks.kernels.bench_kernels import seconds
from benchmarks.trellis import sketches
from benchmarks.trellis.coder import Trellis
from benchmarks.trellis.formats import AROUND, USEFUL, WIDEST
from mlx_tq.codec.formats import CodecOptions, get_format
from mlx_tq.commands.environment import environment
from mlx_tq.kernels.build import backend

RESULTS = Path(__file__).resolve().parent.parent / "results"
DIM, TOKENS = 128, (32, 96)  # counted: what the second has more than the first
# On a GPU: KV heads, tokens of a context and of a prompt; widths of Llama 3 8B's matrices.
HEADS, CONTEXT, PROMPT = 8, 32768, 2048
MATRICES = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))


def rows_of(keys: np.ndarray, values: np.ndarray, bits: int) -> mx.array:
    """Rows [1, S, W] of tq's layout from words of keys and values, with scales sqrt(D): levels as they are."""
    scales = np.full((len(keys), 2), DIM**0.5, np.float16).view(np.uint16)
    words = np.concatenate([keys, values, scales], axis=-1)
    return mx.array(np.ascontiguousarray(words).view(np.uint32)[None])


def error(call: sketches.Call, outputs: list[mx.array], asked: np.ndarray, parts: list[np.ndarray]) -> float:
    """Of attention by a sketch, over the largest output; decoded keys and values in `parts`."""
    output, _, total = (np.array(x, np.float64)[0, 0] for x in outputs)
    exact = sketches.reference(asked, *parts)
    return float(np.abs(output / total[:, None] - exact).max() / np.abs(exact).max())


def attention(bits: int) -> list[dict[str, Any]]:
    """Lane operations of pass 1 for a token, by how its codes are read."""
    rng = np.random.default_rng(3)
    asked = (rng.standard_normal((DIM, sketches.QUERIES)) * DIM**-0.5).astype(np.float32)
    vectors = [rng.standard_normal((TOKENS[1], DIM)).astype(np.float32) for _ in range(2)]
    found = []
    for kind in sketches.KINDS:
        trellis = Trellis(bits, WIDEST[bits], "computed" if kind == "computed" else "trained", AROUND)
        states = [np.array(trellis.encode(mx.array(x))) for x in vectors]
        rows = rows_of(*(sketches.codes(s, bits) for s in states), bits)
        total = []
        for tokens in TOKENS:
            call = sketches.attend(rows[:, :tokens], mx.array(asked[None]), DIM, trellis, kind, block=1 << 20)
            outputs, counters = call.counted()
            total.append(sum(counters.operations.values()))
        if kind != "tq":
            gain = float(np.float16(DIM**0.5)) / DIM**0.5
            levels = gain * (sketches.sums(trellis.window) if kind == "computed" else np.array(trellis.levels))
            off = error(call, outputs, asked, [levels[s][:, sketches.order(DIM, bits)] for s in states])
            assert off < 1e-5, f"the sketch of {kind} at {bits} bits is off by {off}"
        found.append({"bits": bits, "reads": kind, "lane_operations": (total[1] - total[0]) / (TOKENS[1] - TOKENS[0])})
        print(found[-1], flush=True)
    return found


def encoding(trellis: Trellis) -> dict[str, Any]:
    """Lane operations of encoding, for a value; what is chosen is held to mlx's operations."""
    x = mx.array(np.random.default_rng(4).standard_normal((8, DIM)).astype(np.float32))
    (found,), counters = sketches.encode(x, trellis).counted()
    row = {"bits": trellis.bits, "window": trellis.window, "around": trellis.around}
    row |= {"lane_operations": sum(counters.operations.values()) / x.size, "equal": agreement(x, found, trellis)}
    assert row["equal"] >= 0.993, row
    print(row, flush=True)
    return row


def agreement(x: mx.array, path: mx.array, trellis: Trellis) -> float:
    """The share of states that mlx's operations choose too."""
    return float((path == trellis.encode(x)).mean())


def counted() -> dict[str, Any]:
    """Operations on the simulator."""
    attend = [row for bits in WIDEST for row in attention(bits)]
    rows = []
    for bits, widest in WIDEST.items():
        rows += [encoding(Trellis(bits, widest))]
        rows += [encoding(Trellis(bits, window, around=AROUND)) for window in range(widest, USEFUL[bits] - 1, -1)]
    return {"dim": DIM, "queries": sketches.QUERIES, "attend": attend, "encode": rows}


def timed() -> dict[str, Any]:
    """Times on a GPU: attention over a context, encoding a prompt's keys and values in one layer, and its matrices."""
    mx.random.seed(0)
    attend, rows = [], []
    asked = mx.random.normal((HEADS, DIM, sketches.QUERIES)) * DIM**-0.5
    for bits, widest in WIDEST.items():
        width = get_format(f"tq{bits}").codec(DIM, CodecOptions()).words + 1
        ones = mx.full((HEADS, CONTEXT, 1), 0x3C003C00, mx.uint32)
        high, low = (mx.random.randint(0, 1 << 16, (HEADS, CONTEXT, width - 1), mx.uint32) for _ in range(2))
        packed = mx.concatenate([high << 16 | low, ones], axis=-1)
        mx.eval(packed)
        for kind in sketches.KINDS:
            call = sketches.attend(packed, asked, DIM, Trellis(bits, widest), kind)
            attend.append({"bits": bits, "reads": kind, "seconds": seconds(call.run), "nbytes": packed.nbytes})
            print(attend[-1], flush=True)
    x = mx.random.normal((2 * HEADS * PROMPT, DIM))
    for bits, widest in WIDEST.items():
        for trellis in (
            Trellis(bits, widest),
            *(Trellis(bits, w, around=AROUND) for w in range(widest, USEFUL[bits] - 1, -1)),
        ):
            call = sketches.encode(x, trellis)
            row = {"bits": bits, "window": trellis.window, "around": trellis.around, "seconds": seconds(call.run)}
            row["equal"] = agreement(x[:512], call.run()[0][:512], trellis)
            rows.append(row)
            print(row, flush=True)
    tokens = mx.random.normal((PROMPT, 4096)).astype(mx.bfloat16)
    wide = mx.random.normal((PROMPT, 14336)).astype(mx.bfloat16)
    weights = [mx.random.normal(shape).astype(mx.bfloat16) for shape in MATRICES]
    mx.eval(tokens, wide, weights)
    layer = seconds(lambda: [(wide if len(w) == 14336 else tokens) @ w for w in weights])
    sizes = {"heads": HEADS, "context": CONTEXT, "prompt": PROMPT, "layer": layer}
    return {"dim": DIM, "queries": sketches.QUERIES, **sizes, "attend": attend, "encode": rows}


def main() -> None:
    """Measure what is here and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="default: benchmarks/results/trellis_{metal,cuda,counted}.json")
    args = parser.parse_args()
    where = backend()
    about = {"command": "python -m benchmarks.trellis.costs", "environment": environment()}
    about |= timed() if where else counted()
    path = Path(args.json or RESULTS / f"trellis_{where or 'counted'}.json")
    path.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
