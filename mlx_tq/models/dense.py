"""Makes packed weights dense: mlx multiplies those value by value on a CPU, several times slower than dense ones."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx.utils import tree_flatten

_PARTS = 2  # dense weights may take one of these parts of the memory: caches and prefill need the rest
# Files with the limit of a container and with its statistics, and what these call the memory that is not cache.
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.stat", "anon"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.stat", "total_rss"),
)
_WEIGHTS = "_mlx_tq_dense_weights"  # the attribute of a model


@dataclass(frozen=True)
class DenseWeights:
    """The bytes that packed weights take, and that they take when they are dense."""

    packed_nbytes: int
    dense_nbytes: int

    @classmethod
    def of(cls, model: Any, dtype: mx.Dtype) -> "DenseWeights | None":
        """Return the bytes of all weights as they are, and with the packed ones in `dtype`; None if none is packed."""
        layers = [module for module in model.modules() if _is_packed(module)]
        if not layers:
            return None
        parts = [layer.get(name) for layer in layers for name in ("weight", "scales", "biases")]
        packed = sum(part.nbytes for part in parts if part is not None)
        total = sum(weight.nbytes for weight in _weights_of(model).values())
        values = sum(layer.weight.size * 32 // layer.bits for layer in layers)
        return cls(total, total - packed + values * dtype.size)

    def refusal(self, memory: int | None = None) -> str | None:
        """Return why they stay packed, if dense ones do not fit into half of `memory`, by default of what is free."""
        room = free_ram() if memory is None else memory
        if room is None or self.dense_nbytes <= room // _PARTS:
            return None
        sizes = f"{_gigabytes(self.dense_nbytes)}, more than half of {_gigabytes(room)}"
        return (
            f"the weights stay packed, which is slow on a CPU: dense, they would take {sizes}"
            f"{' of free memory' if memory is None else ''}. --dequantize on makes them dense, off hides this warning."
        )


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3g} GB"


def _weights_of(model: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def _is_packed(module: Any) -> bool:
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear  # imports mlx_lm

    return isinstance(module, QuantizedLinear | QuantizedEmbedding | QuantizedSwitchLinear)


def make_dense(model: Any, dtype: mx.Dtype | None = None) -> None:
    """Dequantize in float32, and round the result to `dtype`, by default that of the model; it is not computed yet."""
    from mlx_lm.utils import dequantize_model  # imports transformers, which takes a second

    halves = {weight.dtype for weight in _weights_of(model).values()} & {mx.float16, mx.bfloat16}
    dtype = dtype or (halves.pop() if halves else mx.float32)
    setattr(model, _WEIGHTS, DenseWeights.of(model, dtype))
    model.set_dtype(mx.float32)
    dequantize_model(model)
    model.set_dtype(dtype)


def dense_weights(model: Any) -> DenseWeights | None:
    """Return what dequantizing a model's weights cost; None if they were not, or were dense already."""
    sizes: DenseWeights | None = getattr(model, _WEIGHTS, None)
    return sizes


def compute_weights(model: Any) -> None:
    """Read or compute a model's weights one by one: a signal is noticed, and packed weights are freed, in between."""
    for weight in _weights_of(model).values():
        mx.eval(weight)


def free_ram() -> int | None:
    """Return the bytes of RAM that this process can still take, at most those of its container; None if unknown."""
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    free = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return min([*free, *(rest for cgroup in _CGROUPS if (rest := _container_rest(*cgroup)) is not None)], default=None)


def _container_rest(limit: str, statistics: str, used: str) -> int | None:
    """Return the bytes that a container has left, or None if it has no limit."""
    try:
        most, lines = Path(limit).read_text().strip(), Path(statistics).read_text().splitlines()
    except OSError:
        return None
    taken = dict(line.split(maxsplit=1) for line in lines if " " in line)
    return max(0, int(most) - int(taken.get(used, 0))) if most.isdecimal() else None
