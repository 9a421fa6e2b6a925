"""Sketches of the kernels that trellis codes would need: their calls, on a GPU or on the simulator."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks.trellis.coder import Trellis
from metal_sim.run import Counters, simulate
from mlx_tq.kernels.build import backend
from mlx_tq.kernels.source import text

QUERIES, SIMDGROUPS, BLOCK = 4, 2, 256
AT_ONCE = 4096  # vectors that are searched together
KINDS = ("tq", "table", "computed")


@cache
def _built(name: str, constants: tuple[tuple[str, int], ...], inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Any:
    """The kernel in `name`.metal beside this file, with constants."""
    where = backend() or "metal"
    header, body = text(f"../benchmarks/trellis/{name}", where)
    make: Any = mx.fast.cuda_kernel if where == "cuda" else mx.fast.metal_kernel
    return make(
        name="_".join(["trellis", name, *(str(value) for _, value in constants)]),
        input_names=list(inputs),
        output_names=list(outputs),
        header=header,
        source="".join(f"constexpr int {name} = {value};\n" for name, value in constants) + body,
        ensure_row_contiguous=True,
    )


@dataclass(frozen=True)
class Call:
    """A kernel with its arguments."""

    kernel: Any
    arguments: dict[str, Any]

    def run(self) -> list[mx.array]:
        """Its outputs, computed on a GPU."""
        found: list[mx.array] = self.kernel(**self.arguments)
        return found

    def counted(self) -> tuple[list[mx.array], Counters]:
        """Its outputs and what they cost, on the simulator."""
        return simulate(self.kernel, **self.arguments)


def attend(rows: mx.array, asked: mx.array, dim: int, trellis: Trellis, kind: str, block: int = BLOCK) -> Call:
    """Pass 1 for rows [H, S, W] of tq's layout and queries [H, D, QUERIES], as `kind` reads their codes."""
    heads, tokens, _ = rows.shape
    blocks = -(-tokens // block)
    constants = (("D", dim), ("BITS", trellis.bits), ("WINDOW", trellis.window), ("KIND", KINDS.index(kind)))
    inputs = ("asked", "trellis_levels", "token_count", "packed_rows")
    outputs = ("block_outputs", "block_maxima", "block_sums")
    shape = (heads, blocks, QUERIES)
    arguments = {
        "inputs": [asked, trellis.levels, mx.array([tokens] * 8, mx.int32), rows],
        "grid": (32, blocks, heads),
        "threadgroup": (32, 1, 1),
        "output_shapes": [(*shape, dim), shape, shape],
        "output_dtypes": [mx.float32] * 3,
    }
    return Call(_built("attend", (*constants, ("QUERIES", QUERIES)), inputs, outputs), arguments)


def encode(vectors: mx.array, trellis: Trellis) -> Call:
    """The paths of vectors [N, D] of unit variance."""
    count, dim = vectors.shape
    lanes = min(32, trellis.states >> trellis.bits)
    groups = -(-count // (SIMDGROUPS * 32 // lanes))
    constants = (
        ("D", dim),
        ("BITS", trellis.bits),
        ("WINDOW", trellis.window),
        ("AROUND", min(trellis.around or dim // 2, dim // 2)),
        ("SIMDGROUPS", SIMDGROUPS),
    )
    arguments = {
        "inputs": [vectors, trellis.levels],
        "grid": (32 * SIMDGROUPS, groups, 1),
        "threadgroup": (32 * SIMDGROUPS, 1, 1),
        "output_shapes": [(count, dim)],
        "output_dtypes": [mx.uint16],
    }
    return Call(_built("encode", constants, ("unit_vectors", "trellis_levels"), ("paths",)), arguments)


def paths(vectors: mx.array, trellis: Trellis) -> mx.array:
    """The same by the kernel on a GPU, and by mlx's operations without one."""
    if backend():
        return encode(vectors, trellis).run()[0]
    return mx.concatenate([trellis.encode(vectors[i : i + AT_ONCE]) for i in range(0, len(vectors), AT_ONCE)])


def codes(states: np.ndarray, bits: int) -> np.ndarray:
    """The words of paths: their states uint16 [..., D] -> uint16 [..., D bits / 16], in the order of tq's units."""
    own = states & ((1 << bits) - 1)
    ring = (own[..., None] >> np.arange(bits - 1, -1, -1) & 1).reshape(*states.shape[:-1], -1, 16)
    words = (ring * (1 << np.arange(15, -1, -1))).sum(axis=-1).astype(np.uint16)
    per_unit = 3 if bits == 3 else 1
    return words.reshape(*words.shape[:-1], -1, per_unit).swapaxes(-1, -2).reshape(words.shape)


def order(dim: int, bits: int) -> np.ndarray:
    """Of each dim, which value of the path it is."""
    per_unit = 16 if bits == 3 else 16 // bits
    return np.arange(dim).reshape(-1, per_unit).T.ravel()


def sums(window: int) -> np.ndarray:
    """The computed levels of all states before they are scaled."""
    hashed = (np.arange(1 << window, dtype=np.uint64) * 34038481 + 76625530) & 0xFFFFFFFF
    return sum(hashed >> shift & 255 for shift in (0, 8, 16, 24)).astype(np.float64) - 510


def reference(asked: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Attention in float64: queries [D, n], keys and values [S, D] -> [n, D]. Scores are powers of two."""
    scores = asked.astype(np.float64).T @ keys.T
    weights = np.exp2(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ values
