"""Translates Metal text, as mlx generates it, to C++ with `cpp/metal_stdlib.h`.

Only the kernel's signature, its instantiation, its threadgroup arrays, and casts and local variables of device
pointers change.
"""

import re
from typing import NamedTuple

# C++ expressions for Metal's thread attributes.
ATTRIBUTES = {
    "thread_position_in_grid": "at(tqsim::self().in_grid)",
    "thread_position_in_threadgroup": "at(tqsim::self().in_threadgroup)",
    "threadgroup_position_in_grid": "at(tqsim::machine->group_in_grid)",
    "threadgroups_per_grid": "at(tqsim::machine->groups)",
    "threads_per_grid": "at(tqsim::machine->threads_in_grid)",
    "threads_per_threadgroup": "at(tqsim::machine->threads_in_group)",
    "thread_index_in_threadgroup": "tqsim::self().index",
    "thread_index_in_simdgroup": "tqsim::self().lane",
    "simdgroup_index_in_threadgroup": "tqsim::self().simdgroup",
    "simdgroups_per_threadgroup": "static_cast<uint32_t>(tqsim::machine->simdgroups.size())",
    "threads_per_simdgroup": "tqsim::LANES",
}

_SIGNATURE = re.compile(r"\[\[kernel\]\] void (\w+)\(\n(.*?)\) \{\n", re.S)
_PARAMETER = re.compile(r"\s*(?P<type>.*?)\s*(?P<name>\w+) \[\[(?P<attribute>\w+)(?:\((?P<number>\d+)\))?\]\]$", re.S)
_INSTANCE = re.compile(r"\ntemplate \[\[host_name.*?decltype\((?P<instance>.*?)\) .*", re.S)
_SHARED = re.compile(r"\bthreadgroup (\w+) (\w+)\[([^;]*)\];")
_LOCAL = re.compile(r"\b(const )?device (\w+)\* (\w+) =")
_RECAST = re.compile(r"\breinterpret_cast<const device (\w+)\*>")
_SPACES = re.compile(r"\b(?:device|constant)\b\s*")

_ENTRY = """
extern "C" void tqsim_dispatch(tqsim::Dispatch* dispatch) {
  tqsim::run(*dispatch, [](tqsim::Dispatch& d) {
    auto at = [](tqsim::Position p) { return uint3{p.x, p.y, p.z}; };
    (void)at, (void)d;
    %s(%s);
  });
}
"""


class Parameter(NamedTuple):
    """A parameter of a kernel."""

    name: str
    type: str  # in Metal
    attribute: str
    number: int | None  # of a buffer

    def cpp_type(self) -> str:
        plain = _SPACES.sub("", self.type)
        return f"tqsim::Pointer<{plain.removesuffix('*')}>" if plain.endswith("*") else plain

    def argument(self) -> str:
        """Return what the C++ entry passes for it."""
        if self.number is None:
            return ATTRIBUTES[self.attribute]
        if self.type.endswith("*"):
            return f"{self.cpp_type()}(d.buffers[{self.number}], {self.number})"
        return f"*reinterpret_cast<{self.cpp_type().removesuffix('&')}*>(d.buffers[{self.number}].data)"


def parameters(text: str) -> list[Parameter]:
    signature = _SIGNATURE.search(text)
    assert signature, f"no kernel in:\n{text}"
    result = []
    for parameter in signature.group(2).split(",\n"):
        match = _PARAMETER.match(parameter)
        assert match, f"unknown parameter {parameter!r}"
        number = None if match["number"] is None else int(match["number"])
        result.append(Parameter(match["name"], match["type"], match["attribute"], number))
    return result


def translate(text: str) -> str:
    """Return a C++ translation unit whose `tqsim_dispatch` runs the kernel."""
    signature = _SIGNATURE.search(text)
    assert signature, f"no kernel in:\n{text}"
    declared = parameters(text)
    instance = _INSTANCE.search(text)
    head = f"void {signature.group(1)}({', '.join(f'{p.cpp_type()} {p.name}' for p in declared)}) {{"
    lines = "\n" * signature.group(0).count("\n")  # keeps the line numbers
    body = text[: signature.start()] + head + lines + text[signature.end() : instance.start() if instance else None]
    body = _SHARED.sub(r"TQSIM_SHARED(\1, \2, \3);", body)
    body = _LOCAL.sub(r"tqsim::Pointer<\1\2> \3 =", body)
    body = _RECAST.sub(r"tqsim::recast<const \1>", body)
    called = instance["instance"] if instance else signature.group(1)
    entry = _ENTRY % (called, ", ".join(p.argument() for p in declared))
    return f'#include "metal_stdlib.h"\n#line 1 "kernel.metal"\n{body}\n{entry}'
