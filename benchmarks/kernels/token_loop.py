"""What a token costs in the machine code of attend.metal: instructions by kind, and cycles that a warp waits.

A warp takes 32 tokens of each simdgroup of its team at a time. It has one loop over the units of keys and one over
tokens for values, both unrolled as the compiler likes. How often each runs follows from the bytes that it loads.
"""

import heapq
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.kernels.sass import Instruction, Loop, Program, count_kinds

# Cycles until a result can be used. Shared memory and caches: Luo et al. 2024 (arXiv 2402.13499), H100; device memory:
# about 600 cycles there and in chips and cheese's test of 2023. Arithmetic takes four.
LATENCIES = {"shared load": 29, "shuffle": 23, "special": 18, "global load": 600}
ARITHMETIC = 4
PACKED = ("bool packed = int(block) < packed_blocks;", "constexpr bool packed = true;")


class Sizes(NamedTuple):
    """Constants of attend's text."""

    rows: int  # query rows of a tile
    team: int
    key: tuple[int, int, bool]  # dims, bits, and whether codes are a trellis
    value: tuple[int, int, bool]

    @classmethod
    def of(cls, text: str) -> "Sizes":
        def constant(name: str) -> int:
            return int(re.search(rf"constexpr \w+ {name} = (\d+);", text).group(1))  # type: ignore[union-attr]

        def vector(name: str) -> tuple[int, int, bool]:
            return constant(f"{name}_DIM"), constant(f"{name}_BITS"), bool(constant(f"{name}_TRELLIS"))

        return cls(constant("QUERIES"), constant("TEAM"), vector("KEY"), vector("VALUE"))

    @property
    def key_loads(self) -> int:
        """Return the units of the key of a token that a lane loads; two at a time without a trellis."""
        return _units(*self.key[:2]) if self.key[2] else _units(*self.key[:2]) // 2

    @property
    def value_loads(self) -> int:
        """Return the units that a lane loads of the values of 32 tokens of each simdgroup of the team."""
        units, lanes = _units(*self.value[:2]), 32 * self.team
        slots = max(1, lanes // units)
        return lanes // slots * -(-units // lanes)


def _units(dims: int, bits: int) -> int:
    """Return the units of a vector, see units.h."""
    return dims // (16 if bits == 3 else 16 // bits)


def _units_loaded(loop: Sequence[Instruction], vector: tuple[int, int, bool], all_units: int) -> int:
    """Return the units that one run of a loop loads, of all.

    A unit has one word, or three with 3 bits. A trellis loads the word before, which the compiler keeps from unit to
    unit where it unrolls.
    """
    _, bits, trellis = vector
    loads, words = sum(each.kind == "global load" for each in loop), 3 if bits == 3 else 1
    counts = {loads / (words + trellis), (loads - trellis) / words}
    possible = [int(count) for count in counts if count >= 1 and count == int(count) and all_units % count == 0]
    if not possible:
        raise ValueError(f"a loop with {loads} loads of words does not divide the {all_units} units of its vectors")
    return max(possible)


class TokenCost(NamedTuple):
    """Costs of 32 tokens of each simdgroup of a team, in one warp."""

    instructions: dict[str, float]  # by kind
    cycles: float  # that a warp alone on its scheduler takes

    @property
    def total(self) -> float:
        return sum(self.instructions.values())


def cost_of_tokens(program: Program, sizes: Sizes) -> TokenCost:
    """Return what the loop over tokens costs in a program compiled with PACKED."""
    loop, keys, values = _find_loops(program)
    runs = {values: sizes.value_loads // _units_loaded(program.code(values.blocks), sizes.value, sizes.value_loads)}
    if keys:
        runs = {keys: sizes.key_loads // _units_loaded(program.code(keys.blocks), sizes.key, sizes.key_loads), **runs}
    path = _shortest(program, loop, list(runs))
    total, cycles = Counter(count_kinds(program.code(path))), _cycles(program.code(path))
    for inner, count in runs.items():
        code = program.code(inner.blocks)
        total.update({kind: count * number for kind, number in count_kinds(code).items()})
        cycles += count * (_cycles([*code, *code]) - _cycles(code))
    return TokenCost(dict(total), cycles)


def _find_loops(program: Program) -> tuple[Loop, Loop | None, Loop]:
    """Return the loops over tokens, over the units of a key (None if it is unrolled), and over the tokens of values.

    The weights of tokens are stored between the last two. Of several loops over values, of which some do what an
    unrolled one leaves, the one that loads most is returned.
    """

    def loaded(loop: Loop) -> int:
        return sum(each.kind == "global load" for each in program.code(loop.blocks))

    loading = [loop for loop in program.innermost() if loaded(loop)]
    outer = max(program.loops, key=lambda loop: sum(inner.blocks < loop.blocks for inner in loading))
    inside = [loop for loop in loading if loop.blocks < outer.blocks]
    stores = [i for i in sorted(outer.blocks) if "shared store" in count_kinds(program.code([i]))]
    keys, values = ([loop for loop in inside if (loop.header > stores[0]) == later] for later in (False, True))
    return outer, max(keys, key=loaded, default=None), max(values, key=loaded)


def _shortest(program: Program, loop: Loop, inner: Sequence[Loop]) -> list[int]:
    """Return the blocks on the shortest way around a loop through the given inner loops, without the blocks of these.

    It leaves out what is rare: rescaling for a new maximum, and the rest that an unrolled loop leaves.
    """
    owner = {block: one for one in inner for block in one.blocks}
    path, start = [], loop.header
    for goal in [*(one.header for one in inner), loop.header]:
        queue: list[tuple[int, list[int]]] = [(0, [start])]
        seen: set[int] = set()
        while queue:
            length, way = heapq.heappop(queue)
            block = way[-1]
            if block == goal and len(way) > 1:
                path += [one for one in way[:-1] if one not in owner]
                break
            if block in seen:
                continue
            seen.add(block)
            for other in program.successors[block]:
                if other in loop.blocks and (other == goal or other not in owner or owner[other] is owner.get(start)):
                    size = 0 if other in owner else len(program.blocks[other])
                    heapq.heappush(queue, (length + size, [*way, other]))
        else:
            raise ValueError("the loop over tokens does not lead through its inner loops")
        start = goal
    return path


def _cycles(code: Sequence[Instruction]) -> int:
    """Return when the last instruction is issued, one a cycle and in order, each after what it reads is there."""
    ready: dict[str, int] = {}
    cycle = 0
    for each in code:
        cycle = max([cycle + 1, *(ready.get(name, 0) for name in each.read)])
        for name in each.written:
            ready[name] = cycle + LATENCIES.get(each.kind, ARITHMETIC)
    return cycle
