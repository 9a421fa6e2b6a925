"""Predicts the time of decode attention from what a token costs and what a chip can do.

A Mac is predicted by the larger of two times: bytes at 85 % of the memory bandwidth, and weighted lane operations with
all lanes busy (the lower bound of the kernels' design). An NVIDIA GPU has a third: the cycles of a warp, which waits
for its loads, times the tokens that each warp has.
"""

import math
from typing import NamedTuple

from benchmarks.kernels.token_loop import TokenCost
from mlx_tq.kernels.thresholds import TABLES

USABLE_BANDWIDTH = 0.85
LANES = 128  # of a core of a Mac, and of an SM


class Chip(NamedTuple):
    cores: int
    clock: float  # Hz
    bandwidth: float  # bytes a second
    is_large: bool = False  # Max or Ultra, for which mlx chooses other kernels


# Cores and bandwidth: Apple's and NVIDIA's specifications, the largest variant of each. Clocks: M1 and M2 from
# github.com/philipturner/metal-benchmarks, M3 and M4 from TechPowerUp; M5's is not published, and M4's is assumed.
# NVIDIA states none for an H100 SXM either: this is the boost clock of the PCIe card (chips and cheese, 2023).
CHIPS = {
    "M1": Chip(8, 1.278e9, 68e9),
    "M1 Pro": Chip(16, 1.296e9, 200e9),
    "M1 Max": Chip(32, 1.296e9, 400e9, is_large=True),
    "M1 Ultra": Chip(64, 1.296e9, 800e9, is_large=True),
    "M2": Chip(10, 1.398e9, 100e9),
    "M2 Pro": Chip(19, 1.398e9, 200e9),
    "M2 Max": Chip(38, 1.398e9, 400e9, is_large=True),
    "M3": Chip(10, 1.38e9, 100e9),
    "M3 Pro": Chip(18, 1.38e9, 150e9),
    "M3 Max": Chip(40, 1.38e9, 400e9, is_large=True),
    "M4": Chip(10, 1.47e9, 120e9),
    "M4 Pro": Chip(20, 1.578e9, 273e9),
    "M4 Max": Chip(40, 1.578e9, 546e9, is_large=True),
    "M5": Chip(10, 1.578e9, 153e9),
    "M5 Pro": Chip(20, 1.578e9, 307e9),
    "M5 Max": Chip(40, 1.578e9, 614e9, is_large=True),
}
H100, H200 = Chip(132, 1.755e9, 3350e9), Chip(132, 1.755e9, 4800e9)
SCHEDULERS = 4  # of an SM; each issues one instruction of a warp a cycle


class Prediction(NamedTuple):
    seconds: float
    bound: str  # memory, arithmetic or latency


def predict(chip: Chip, nbytes: float, lane_cycles: float) -> Prediction:
    """Return the larger of the times for bytes and for lane cycles, of a whole call."""
    memory = nbytes / (USABLE_BANDWIDTH * chip.bandwidth)
    arithmetic = lane_cycles / (chip.cores * LANES * chip.clock)
    return max(Prediction(memory, "memory"), Prediction(arithmetic, "arithmetic"))


class Launch(NamedTuple):
    """How `attend` divides a call on CUDA."""

    warps: int
    rounds: int  # of 32 tokens for each simdgroup of a team, in the longest block

    @classmethod
    def of(cls, tokens: int, tiles: int, team: int) -> "Launch":
        limits = TABLES["cuda"]
        most = max(1, limits.simdgroups // (team * tiles))
        blocks = min(-(-tokens // limits.min_block), most, limits.max_blocks)
        size = 32 * math.ceil(math.ceil(tokens / blocks) / 32)
        return cls(team * tiles * blocks, math.ceil(size / (32 * team)))


def predict_warps(chip: Chip, launch: Launch, cost: TokenCost, nbytes: float, resident: int) -> Prediction:
    """Return the largest of three times of packed tokens: for bytes, for issuing instructions, and for waiting warps.

    Args:
        launch: the warps and what each does.
        cost: of one round of a warp.
        nbytes: of all rows.
        resident: warps that an SM has room for, see `resident_warps`.
    """
    memory = nbytes / (USABLE_BANDWIDTH * chip.bandwidth)
    issue = launch.warps * launch.rounds * cost.total / (chip.cores * SCHEDULERS * chip.clock)
    waves = math.ceil(launch.warps / (chip.cores * resident))
    latency = waves * launch.rounds * cost.cycles / chip.clock
    return max(Prediction(memory, "memory"), Prediction(issue, "arithmetic"), Prediction(latency, "latency"))


def resident_warps(registers: int, shared: int, threads: int) -> int:
    """Return the warps of a kernel that an SM of an H100 has room for, by the rules of NVIDIA's occupancy calculator.

    An SM has 64 warps, 32 blocks, 64K registers, which warps get in units of 256 and each of four schedulers has a
    quarter of, and 228 KB of shared memory, of which each block takes 1 KB more and whole units of 128 bytes.
    """
    warps = -(-threads // 32)
    limits = [64 // warps, 32, 228 * 1024 // (128 * -(-shared // 128) + 1024)]
    if registers:
        per_warp = 256 * -(-32 * registers // 256)
        limits.append(SCHEDULERS * (65536 // SCHEDULERS // per_warp) // warps)
    return warps * min(limits)
