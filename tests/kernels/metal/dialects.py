"""The kernels' text in two other dialects, to have it checked by compilers that this machine may have.

C++ for OpenCL has Metal's address spaces under other names, and clang checks them; CUDA is what `mx.fast.cuda_kernel`
writes. Both are made from the text that mlx generates for Metal.
"""

import re
from pathlib import Path
from typing import NamedTuple

from metal_sim.translate import parameters

_SIGNATURE = re.compile(r"(?:template <(?P<template>[^>]*)>\n)?\[\[kernel\]\] void (?P<name>\w+)\(\n.*?\) \{\n", re.S)
_INSTANCE = re.compile(r"\ntemplate \[\[host_name.*?decltype\(\w+<(?P<values>.*?)>\) .*", re.S)

OPENCL_PRELUDE = Path(__file__).with_name("opencl_prelude.h").read_text()
CUDA_PRELUDE = Path(__file__).with_name("cuda_prelude.h").read_text()


class Parts(NamedTuple):
    """A generated text: what stands before the kernel, its name, its template's constants, and its body."""

    header: str
    name: str
    constants: list[str]
    body: str


def _parts(text: str) -> Parts:
    signature, instance = _SIGNATURE.search(text), _INSTANCE.search(text)
    assert signature
    constants = []
    if instance:
        names, values = signature["template"].split(", "), instance["values"].split(", ")
        for declared, value in zip(names, values, strict=True):
            kind, name = declared.split()
            constants.append(
                f"using {name} = {value};" if kind == "typename" else f"constexpr {kind} {name} = {value};"
            )
    body = text[signature.end() : instance.start() if instance else None]
    return Parts(text[: signature.start()], signature["name"], constants, body)


def opencl(text: str) -> str:
    """One kernel in C++ for OpenCL 2021."""
    header, name, constants, body = _parts(text)
    arguments = [f"{p.type} {p.name}" for p in parameters(text)]
    return "\n".join([OPENCL_PRELUDE, header, f"kernel void {name}({', '.join(arguments)}) {{", *constants, body])


def cuda(text: str) -> str:
    """One kernel as `mx.fast.cuda_kernel` writes it; shapes and strides come by value there."""
    header, name, constants, body = _parts(text)
    arguments = []
    for parameter in parameters(text):
        if parameter.index is None:
            continue
        plain = re.sub(r"\b(device|constant)\b\s*", "", parameter.type)
        by_value = re.search(r"_(shape|strides)$", parameter.name)
        arguments.append(f"{by_value.group(1).title() if by_value else plain} {parameter.name}")
    return "\n".join([CUDA_PRELUDE, header, f"__global__ void {name}({', '.join(arguments)}) {{", *constants, body])
