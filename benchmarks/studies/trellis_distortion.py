"""Study the error of trellis codes on Gaussian vectors: by bits, states, size and search for the cut.

    python -m benchmarks.studies.trellis_distortion

Lloyd-Max is the comparison. Levels of other numbers of states are trained as the package's own were.
"""

import time

import mlx.core as mx
import numpy as np

from benchmarks.reports import save
from benchmarks.studies.trellis_train import trained
from mlx_tq.codec.codebook import levels, mse, normal_density
from mlx_tq.codec.formats import trellis

VECTORS, DIM = 2000, 128
BITS, WINDOWS = (4, 3, 2), (9, 8, 7, 6)
DIMS = (64, 80, 96, 128, 192, 256)
AROUNDS = (4, 8, 12, 16, 24, 32, 64)


def measured(bits: int, table: mx.array, dim: int = DIM, around: int = trellis.CUT_CONTEXT) -> dict[str, object]:
    rng = np.random.default_rng(99)
    found, started = [], time.perf_counter()
    for _ in range(VECTORS // 500):
        x = mx.array(rng.standard_normal((500, dim)).astype(np.float32))
        found.append(np.array(mx.square(x - table[trellis.search_ring(x, table, bits, around)]).mean(axis=-1)))
    errors = np.concatenate(found)
    row = {"bits": bits, "states": table.size, "dim": dim, "around": around}
    row |= {"mse": float(errors.mean()), "mse_error": float(errors.std() / len(errors) ** 0.5)}
    print(f"{row} in {time.perf_counter() - started:.1f} s", flush=True)
    return row


def main() -> None:
    rows = []
    for bits in BITS:
        own = trellis.state_levels(bits)
        tables = (own if window == trellis.WINDOW else mx.array(trained(bits, window)) for window in WINDOWS)
        rows += [measured(bits, table) for table in tables]
        rows += [measured(bits, own, dim) for dim in DIMS if dim != DIM]
        rows += [measured(bits, own, around=around) for around in AROUNDS if around != trellis.CUT_CONTEXT]
    nearest = {str(bits): mse(levels(bits).astype(np.float64), normal_density) for bits in BITS}
    command = "python -m benchmarks.studies.trellis_distortion"
    save("trellis_distortion.json", command, vectors=VECTORS, nearest=nearest, rows=rows)


if __name__ == "__main__":
    main()
