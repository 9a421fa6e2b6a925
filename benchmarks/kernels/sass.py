"""Compiles kernels with NVIDIA's compiler for an H100 (sm_90), and reads the machine code (SASS)."""

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from importlib.metadata import PackageNotFoundError, files
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from metal_sim.cuda import to_cuda

_FUNCTION = re.compile(r"^\.text\.(\S+):$")
_LABEL = re.compile(r"^(\.L\w+):$")
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_TARGET = re.compile(r"`\((\.L\w+)\)")
_REGISTER = re.compile(r"\bU?[RP]\d+\b")
# By the opcode's first part, for those that are not integer arithmetic, moves and comparisons.
KINDS = {
    **dict.fromkeys(("FFMA", "FMUL", "FADD"), "float"),
    **dict.fromkeys(("HADD2", "F2F", "F2I", "I2F", "I2FP"), "convert"),  # HADD2 makes a float of a half
    "LDG": "global load",
    "STG": "global store",
    "LDS": "shared load",
    "STS": "shared store",
    **dict.fromkeys(("LDL", "STL"), "spill"),
    "SHFL": "shuffle",
    "MUFU": "special",
    "HMMA": "matrix",
    **dict.fromkeys(("BRA", "BSSY", "BSYNC", "CALL", "RET", "EXIT", "WARPSYNC", "BAR", "NOP"), "branch"),
}


class Instruction(NamedTuple):
    opcode: str
    operands: str
    predicate: str | None = None
    target: int | None = None  # number of the instruction that it branches to

    @property
    def kind(self) -> str:
        return KINDS.get(self.opcode.partition(".")[0], "integer")

    @property
    def width(self) -> int:
        """Return the bytes that a lane loads or stores."""
        bits = re.search(r"\.[US]?(8|16|64|128)\b", self.opcode)
        return int(bits.group(1)) // 8 if bits else 4

    @property
    def written(self) -> set[str]:
        """Return the registers that the instruction writes; a wide load writes several."""
        if self.kind in ("global store", "shared store", "branch"):
            return set()
        match = _REGISTER.match(self.operands)
        if not match:
            return set()
        name, number = re.fullmatch(r"(\D+)(\d+)", match.group()).groups()  # type: ignore[union-attr]
        count = max(1, self.width // 4) if "load" in self.kind else 2 if ".WIDE" in self.opcode else 1
        return {f"{name}{int(number) + i}" for i in range(count)}

    @property
    def read(self) -> set[str]:
        first, _, others = self.operands.partition(",")
        stores = self.kind in ("global store", "shared store", "branch")
        return set(_REGISTER.findall(f"{first if stores else ''} {others} {self.predicate or ''}"))


class Loop(NamedTuple):
    header: int  # number of its first block
    blocks: frozenset[int]


class Program:
    """A kernel's instructions, and their basic blocks."""

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self.instructions = instructions
        ends = [i + 1 for i, each in enumerate(instructions) if _ends_block(each)]
        targets = [each.target for each in instructions if each.target is not None]
        edges = sorted({0, len(instructions), *ends, *targets})
        self.blocks = [range(*edge) for edge in pairwise(edges)]
        numbers = {block.start: number for number, block in enumerate(self.blocks)}
        self.successors = [list(self._successors(block, numbers)) for block in self.blocks]

    def _successors(self, block: range, numbers: dict[int, int]) -> Iterator[int]:
        last = self.instructions[block[-1]]
        if last.target is not None and _ends_block(last):
            yield numbers[last.target]
        always = last.predicate is None and not re.match(r"!?U?P\d", last.operands)
        if not (_ends_block(last) and always) and block.stop in numbers:
            yield numbers[block.stop]

    @cached_property
    def loops(self) -> list[Loop]:
        """Return the natural loops, by their headers."""
        dominators, bodies = self._dominators(), dict[int, set[int]]()
        for number, over in dominators.items():
            for header in over.intersection(self.successors[number]):
                body, waiting = bodies.setdefault(header, {header}), [number]
                while waiting:
                    block = waiting.pop()
                    if block not in body:
                        body.add(block)
                        waiting += (other for other in dominators if block in self.successors[other])
        return [Loop(header, frozenset(body)) for header, body in sorted(bodies.items())]

    def _dominators(self) -> dict[int, set[int]]:
        """Return the blocks through which every way to a block leads, for the blocks that can be reached."""
        order, seen = [], {0}
        waiting = [0]
        while waiting:
            block = waiting.pop()
            order.append(block)
            waiting += (new := [other for other in self.successors[block] if other not in seen])
            seen.update(new)
        result = {block: set(order) for block in order} | {0: {0}}
        before = {block: [other for other in order if block in self.successors[other]] for block in order}
        changed = True
        while changed:
            changed = False
            for block in order[1:]:
                found = set.intersection(*(result[other] for other in before[block])) | {block}
                changed |= found != result[block]
                result[block] = found
        return result

    def innermost(self) -> list[Loop]:
        return [loop for loop in self.loops if not any(other.blocks < loop.blocks for other in self.loops)]

    def code(self, blocks: Sequence[int] | frozenset[int]) -> list[Instruction]:
        return [self.instructions[i] for block in sorted(blocks) for i in self.blocks[block]]


def _ends_block(instruction: Instruction) -> bool:
    """Return whether control may go elsewhere; lanes never part at BRA.DIV, and calls return."""
    return instruction.opcode.partition(".")[0] in ("BRA", "EXIT", "RET") and ".DIV" not in instruction.opcode


class Compiled(NamedTuple):
    """What the compiler says of a kernel."""

    registers: int
    spilled: int  # bytes stored and loaded
    shared: int  # bytes of shared memory
    program: Program


def count_kinds(instructions: Sequence[Instruction]) -> dict[str, int]:
    return dict(Counter(each.kind for each in instructions))


def parse(text: str) -> dict[str, Program]:
    """Return the programs of what nvdisasm prints, by the names of their functions."""
    functions: dict[str, list[tuple[str, str, str | None, str | None]]] = {}
    labels: dict[str, int] = {}
    current: list[tuple[str, str, str | None, str | None]] = []
    for line in text.splitlines():
        if match := _FUNCTION.match(line):
            current = functions.setdefault(match.group(1), [])
        elif match := _LABEL.match(line):
            labels[match.group(1)] = len(current)
        elif match := _INSTRUCTION.match(line):
            _, predicate, opcode, operands = match.groups()
            target = _TARGET.search(operands) if opcode.startswith("BRA") else None
            current.append((opcode, operands, predicate, target and target.group(1)))
    return {
        name: Program([Instruction(*rest, labels[target] if target else None) for *rest, target in instructions])
        for name, instructions in functions.items()
    }


def find_tool(name: str) -> str | None:
    """Return the path of nvcc or nvdisasm, on the path or in the wheel nvidia-cuda-NAME."""
    if path := shutil.which(name):
        return path
    try:
        found = [file for file in files(f"nvidia-cuda-{name}") or [] if file.name == name]
    except PackageNotFoundError:
        return None
    return str(found[0].locate()) if found else None


def compile_kernels(texts: Sequence[str]) -> list[Compiled]:
    """Compile kernels as one file, so that the compiler reads CUDA's headers once."""
    nvcc, nvdisasm = (find_tool(name) for name in ("nvcc", "nvdisasm"))
    if not nvcc or not nvdisasm:
        raise SystemExit(
            f"nvcc is {nvcc} and nvdisasm is {nvdisasm}: both are needed. Install them with pip install '.[nvcc]'."
        )
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "kernels.cu", Path(folder) / "kernels.cubin"
        source.write_text(to_cuda(texts), encoding="utf-8")
        command = [nvcc, "-arch=sm_90", "-std=c++17", "-cubin", "-Xptxas", "-v", "-o", cubin, source]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"nvcc cannot compile the kernels: {done.stderr}")
        listing = subprocess.run([nvdisasm, "-c", cubin], capture_output=True, text=True, check=True).stdout
    reports = re.split(r"Compiling entry function '(\w+)'", done.stderr)
    programs, result = parse(listing), dict[int, Compiled]()
    for name, report in zip(reports[1::2], reports[2::2], strict=True):
        number = re.search(r"kernel_(\d+)_", name)
        assert number
        result[int(number.group(1))] = Compiled(
            registers=_number(r"Used (\d+) registers", report),
            spilled=_number(r"(\d+) bytes spill stores", report) + _number(r"(\d+) bytes spill loads", report),
            shared=_number(r"(\d+) bytes smem", report),
            program=programs[name],
        )
    return [result[number] for number in range(len(texts))]


def _number(pattern: str, report: str) -> int:
    match = re.search(pattern, report)
    return int(match.group(1)) if match else 0
