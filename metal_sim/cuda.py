"""Translates the text that mlx generates for Metal to CUDA, for kernels whose helpers come from their part for CUDA."""

import re
from collections.abc import Sequence
from pathlib import Path

from metal_sim.translate import parameters

_SIGNATURE = re.compile(r"\[\[kernel\]\] void (?P<name>\w+)\(\n.*?\) \{\n", re.S)
_PRELUDE = (Path(__file__).parent / "cpp" / "cuda_prelude.h").read_text(encoding="utf-8")


def split_text(text: str) -> tuple[str, str, str]:
    """Return what precedes the kernel, its name, and its body."""
    signature = _SIGNATURE.search(text)
    assert signature
    return text[: signature.start()], signature["name"], text[signature.end() :]


def to_cuda(texts: Sequence[str]) -> str:
    """Translate kernels to CUDA, where shapes and strides are passed by value; kernel n is in namespace kernel_n_."""
    parts = [_PRELUDE]
    for number, text in enumerate(texts):
        header, name, body = split_text(text)
        arguments = []
        for parameter in (parameter for parameter in parameters(text) if parameter.number is not None):
            plain = re.sub(r"\b(device|constant)\b\s*", "", parameter.type)
            by_value = re.search(r"_(shape|strides)$", parameter.name)
            arguments.append(f"{by_value.group(1).title() if by_value else plain} {parameter.name}")
        signature = f"__global__ void {name}({', '.join(arguments)}) {{"
        parts += [f"namespace kernel_{number}_ {{", header, signature, body, "}"]
    return "\n".join(parts)
