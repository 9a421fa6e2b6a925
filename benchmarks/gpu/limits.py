"""How many threads a threadgroup of each kernel may have on this chip, which differs by pipeline and chip."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import mlx.core as mx

from benchmarks.gpu.setting import Cells, Setting
from mlx_tq.bench.layer import measure_cell
from mlx_tq.bench.layer_caches import Cell, LayerArm, LayerShape
from mlx_tq.config import KVConfig
from mlx_tq.kernels.gpu import THREAD_LIMIT, compile_kernel

DIMS = (64, 128, 256, 512)
TOO_MANY = 4096  # threads, which mlx refuses with the number that it would allow
ARMS = [LayerArm(f"{key}/tq4", config=KVConfig(key=key, value="tq4")) for key in ("q8", "tq4")]


def cells(setting: Setting) -> Cells:
    for dim in DIMS:
        yield f"threads, D = {dim}", lambda dim=dim: measure(setting, dim)


def measure(setting: Setting, dim: int) -> dict[str, Any]:
    """Return the most threads per threadgroup of each kernel that attention with this head size runs."""
    if setting.backend != "metal":
        return {"skipped": "only Metal has a limit per pipeline; CUDA's compiler prints registers"}
    limits: dict[str, int] = {}
    make = mx.fast.metal_kernel

    def make_probed(**definition: Any) -> Callable[..., list[mx.array]]:
        return probe(make(**definition), definition["name"], limits)

    compile_kernel.cache_clear()
    with mock.patch.object(mx.fast, "metal_kernel", make_probed):
        for tokens in (320, 4096):  # of a short context, and of one that is cut into blocks
            measure_cell(Cell(LayerShape(8, 2, dim), tokens), ARMS, rounds=1, seconds=0, memory=1 << 28)
    compile_kernel.cache_clear()
    return {"threads": limits}


def probe(kernel: Any, name: str, limits: dict[str, int]) -> Callable[..., list[mx.array]]:
    """Return the kernel's function, which first asks mlx for the kernel's limit."""

    def run(**call: Any) -> list[mx.array]:
        if name not in limits:
            try:
                mx.eval(kernel(**call | {"threadgroup": (TOO_MANY, 1, 1), "grid": (TOO_MANY, 1, 1)}))
            except (RuntimeError, ValueError) as error:
                if (found := THREAD_LIMIT.search(str(error))) is not None:
                    limits[name] = int(found.group(1))
        outputs: list[mx.array] = kernel(**call)
        return outputs

    return run
