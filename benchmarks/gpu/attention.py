"""Decode attention of one layer: mlx's own, mlx-lm's quantized caches and compressed caches."""

from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.setting import Cells, Setting
from mlx_tq.bench.layer import measure_cell
from mlx_tq.bench.layer_caches import Cell, LayerArm, LayerShape
from mlx_tq.bench.timing import measure_speed
from mlx_tq.config import KVConfig

SHAPES = {
    "Qwen3": LayerShape(32, 8, 128),
    "Qwen3.5 24/4": LayerShape(24, 4, 256),
    "Qwen3.5 16/2": LayerShape(16, 2, 256),
    "Qwen3.5 16/4": LayerShape(16, 4, 256),
    "Gemma 3": LayerShape(4, 1, 256),
    "gpt-oss": LayerShape(64, 8, 64),
}
TOKENS = (1024, 4096, 16384, 65536, 131072)
LONG_TOKENS = (4096, 65536)  # of batches and of several queries
DRY_SHAPES, DRY_TOKENS = {"Gemma 3": LayerShape(4, 1, 64), "gpt-oss": LayerShape(4, 2, 64)}, (96,)

PLAIN = [LayerArm("fp16"), LayerArm("fp16, queued writes", writes=True), LayerArm("bf16", dtype="bfloat16")]
QUANTIZED = [LayerArm(f"kv-bits {bits}", kv_bits=bits) for bits in (8, 4)]
PACKED = [
    LayerArm(f"{key}/{value}", config=KVConfig(key=key, value=value))
    for key, value in (("q8", "tq4"), ("tq4", "tq4"), ("tq2", "tq2"), ("tcq3", "tcq3"))
]
ARMS = [*PLAIN, *QUANTIZED, *PACKED]
FEW_ARMS = [PLAIN[0], *PACKED[:2]]


def layer_cells(setting: Setting) -> Iterator[tuple[str, Cell, list[LayerArm]]]:
    """Yield what is measured, the most useful first: name of the shape, cell and arms."""
    shapes = DRY_SHAPES if setting.dry else SHAPES
    tokens, long_tokens = (DRY_TOKENS, DRY_TOKENS) if setting.dry else (TOKENS, LONG_TOKENS)
    yield from ((name, Cell(shape, count), ARMS) for count in tokens for name, shape in shapes.items())
    for length in (4, 8):
        for count in long_tokens:
            yield from ((name, Cell(shape, count, length=length), FEW_ARMS) for name, shape in shapes.items())
    for count in long_tokens:
        yield from ((name, Cell(shape, count, batch=8), FEW_ARMS) for name, shape in shapes.items())


def cells(setting: Setting) -> Cells:
    yield "machine before", lambda: measure_speed()._asdict()
    for name, cell, arms in layer_cells(setting):
        key = f"{name}, {cell.tokens} tokens, batch {cell.batch}, {cell.length} queries"
        yield key, lambda name=name, cell=cell, arms=arms: measure(setting, name, cell, arms)
    yield "machine after", lambda: measure_speed()._asdict()


def measure(setting: Setting, name: str, cell: Cell, arms: list[LayerArm]) -> dict[str, Any]:
    timed = measure_cell(cell, arms, rounds=setting.rounds, seconds=setting.seconds, memory=setting.memory)
    return {"name": name, **cell._asdict(), "shape": cell.shape._asdict(), **timed.to_dict()}
