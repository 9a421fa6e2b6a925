"""The kernels' text in two other dialects, to have it checked by compilers that this machine may have.

C++ for OpenCL has Metal's address spaces under other names, and clang checks them; CUDA is what `mx.fast.cuda_kernel`
writes. Both are made from the text that mlx generates for Metal, CUDA with its own part of tq_compat.h.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from metal_sim.translate import Parameter, parameters

_SIGNATURE = re.compile(r"\[\[kernel\]\] void (?P<name>\w+)\(\n.*?\) \{\n", re.S)

OPENCL_PRELUDE = Path(__file__).with_name("opencl_prelude.h").read_text()
CUDA_PRELUDE = Path(__file__).with_name("cuda_prelude.h").read_text()


class Parts(NamedTuple):
    """A generated text: what stands before the kernel, its name, and its body."""

    header: str
    name: str
    body: str


def _parts(text: str) -> Parts:
    signature = _SIGNATURE.search(text)
    assert signature
    return Parts(text[: signature.start()], signature["name"], text[signature.end() :])


def opencl(text: str) -> str:
    """One kernel in C++ for OpenCL 2021."""
    header, name, body = _parts(text)
    arguments = [f"{p.type} {p.name}" for p in parameters(text)]
    return "\n".join([OPENCL_PRELUDE, header, f"kernel void {name}({', '.join(arguments)}) {{", body])


def cuda(texts: Sequence[str]) -> str:
    """Kernels as `mx.fast.cuda_kernel` writes them; shapes and strides come by value there.

    Kernel number n is in a namespace, kernel_n_, of its own.
    """
    parts = [CUDA_PRELUDE]
    for number, text in enumerate(texts):
        header, name, body = _parts(text)
        arguments = ", ".join(_cuda_parameter(p) for p in parameters(text) if p.number is not None)
        parts += [f"namespace kernel_{number}_ {{", header, f"__global__ void {name}({arguments}) {{", body, "}"]
    return "\n".join(parts)


def _cuda_parameter(parameter: Parameter) -> str:
    plain = re.sub(r"\b(device|constant)\b\s*", "", parameter.type)
    by_value = re.search(r"_(shape|strides)$", parameter.name)
    return f"{by_value.group(1).title() if by_value else plain} {parameter.name}"
