"""What a trellis loses of Gaussian vectors, beside Lloyd-Max: by bits, states, table, size and search for the cut.

    python -m benchmarks.trellis.distortion

It writes ../results/trellis_distortion.json.
"""

import json
import time
from pathlib import Path

import mlx.core as mx
import numpy as np

from benchmarks.trellis.coder import Trellis
from benchmarks.trellis.formats import AROUND, LEAST, WIDEST
from mlx_tq.codec.codebook import levels, mse, normal_density
from mlx_tq.commands.environment import environment

TARGET = Path(__file__).resolve().parent.parent / "results" / "trellis_distortion.json"
VECTORS, DIM = 2000, 128
DIMS = (64, 80, 96, 128, 192, 256)
AROUNDS = (4, 8, 12, 16, 24, 32, 64)


def measured(trellis: Trellis, dim: int) -> dict[str, object]:
    """The mean square error of unit-variance Gaussians, and its standard error."""
    rng = np.random.default_rng(99)
    found, started = [], time.perf_counter()
    for _ in range(VECTORS // 500):
        x = mx.array(rng.standard_normal((500, dim)).astype(np.float32))
        found.append(np.array(mx.square(x - trellis.decode(trellis.encode(x))).mean(axis=-1)))
    errors = np.concatenate(found)
    row = {"bits": trellis.bits, "window": trellis.window, "table": trellis.table, "dim": dim}
    row |= {"around": trellis.around or dim // 2, "mse": float(errors.mean())}
    row["mse_error"] = float(errors.std() / len(errors) ** 0.5)
    print(f"{row} in {time.perf_counter() - started:.1f} s", flush=True)
    return row


def main() -> None:
    """Measure and write."""
    rows = []
    for bits, widest in WIDEST.items():
        rows += [measured(Trellis(bits, window), DIM) for window in range(widest, LEAST - 1, -1)]
        rows.append(measured(Trellis(bits, widest, "computed"), DIM))
        rows += [measured(Trellis(bits, widest), dim) for dim in DIMS if dim != DIM]
        rows += [measured(Trellis(bits, widest, around=around), DIM) for around in AROUNDS if around < DIM // 2]
    nearest = {str(bits): mse(levels(bits).astype(np.float64), normal_density) for bits in WIDEST}
    about = {"command": "python -m benchmarks.trellis.distortion", "environment": environment()}
    about |= {"vectors": VECTORS, "around": AROUND, "nearest": nearest, "rows": rows}
    TARGET.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
