"""What all parts of a run need: the backend, the memory, how long to measure, and whether sizes are tiny."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mlx_tq.kernels.gpu import gpu_backend, usable_memory

# A cell's name within its part, and what measures it.
Cells = Iterator[tuple[str, Callable[[], dict[str, Any]]]]

MEMORY_SHARE = 0.6  # of what arrays may take
# Seconds of a chain: shorter ones are decided by the clock's steps on a Mac.
CHAIN_SECONDS = {"cuda": 0.012, "metal": 0.05, "reference": 0.0}


@dataclass(frozen=True)
class Setting:
    """How cells are measured; a dry run has tiny sizes, and the reference backend."""

    dry: bool = False

    @property
    def backend(self) -> str:
        return "reference" if self.dry else gpu_backend() or "reference"

    @property
    def memory(self) -> int:
        return 1 << 20 if self.dry else int(MEMORY_SHARE * usable_memory())

    @property
    def rounds(self) -> int:
        return 1 if self.dry else 3

    @property
    def seconds(self) -> float:
        return CHAIN_SECONDS[self.backend]
