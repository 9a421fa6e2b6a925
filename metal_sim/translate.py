"""Metal text as mlx generates it -> C++ over `cpp/metal_stdlib.h`.

Only the kernel's signature, its instantiation, its threadgroup arrays and casts of device pointers are rewritten; the
rest is compiled as it is.
"""

import re
from typing import NamedTuple

# What stands for each of Metal's thread attributes.
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
    """One of the kernel's: its name, Metal type, attribute, and number where it is a buffer."""

    name: str
    type: str
    attribute: str
    number: int | None

    def declaration(self) -> str:
        """The parameter in C++."""
        return f"{self._pointer() if self._is_pointer() else self._plain()} {self.name}"

    def argument(self) -> str:
        """What the entry passes."""
        if self.number is None:
            return ATTRIBUTES[self.attribute]
        if self._is_pointer():
            return f"{self._pointer()}(d.buffers[{self.number}], {self.number})"
        return f"*reinterpret_cast<{self._plain().removesuffix('&')}*>(d.buffers[{self.number}].data)"

    def _is_pointer(self) -> bool:
        return self.type.endswith("*")

    def _plain(self) -> str:
        return _SPACES.sub("", self.type)

    def _pointer(self) -> str:
        return f"tqsim::Pointer<{self._plain().removesuffix('*')}>"


def parameters(text: str) -> list[Parameter]:
    """The kernel's parameters in order."""
    signature = _SIGNATURE.search(text)
    assert signature, f"no kernel in:\n{text}"
    found = []
    for parameter in signature.group(2).split(",\n"):
        match = _PARAMETER.match(parameter)
        assert match, f"unknown parameter {parameter!r}"
        number = None if match["number"] is None else int(match["number"])
        found.append(Parameter(match["name"], match["type"], match["attribute"], number))
    return found


def translate(text: str) -> str:
    """A C++ translation unit whose `tqsim_dispatch` runs the kernel."""
    signature = _SIGNATURE.search(text)
    assert signature, f"no kernel in:\n{text}"
    declared = parameters(text)
    instance = _INSTANCE.search(text)
    head = f"void {signature.group(1)}({', '.join(p.declaration() for p in declared)}) {{"
    lines = "\n" * signature.group(0).count("\n")  # line numbers stay those of the text
    body = text[: signature.start()] + head + lines + text[signature.end() : instance.start() if instance else None]
    body = _SHARED.sub(r"TQSIM_SHARED(\1, \2, \3);", body)
    body = _RECAST.sub(r"tqsim::recast<const \1>", body)
    called = instance["instance"] if instance else signature.group(1)
    entry = _ENTRY % (called, ", ".join(p.argument() for p in declared))
    return f'#include "metal_stdlib.h"\n#line 1 "kernel.metal"\n{body}\n{entry}'
