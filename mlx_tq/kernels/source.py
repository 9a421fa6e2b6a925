"""Finds the kernels' text in metal/ and takes it apart as `mx.fast` wants it: a header and a body."""

import re
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import NamedTuple

from mlx_tq.errors import KernelUnavailableError

_BODY = "//// body\n"
_COMMENT = re.compile(r"[ \t]*//.*")
_INDENT = re.compile(r"\n\s+")
# In tq_compat.h: the part for CUDA, and the one for Metal.
_DIALECTS = re.compile(r"#if defined\(__CUDACC__\).*?\n(.*?)\n#else\n(.*?)\n#endif\n", re.S)
# What only kernels for normalized keys or trellis codes have, and what others have in its place.
_PARTS = re.compile(r"#if TQ_(NORMALIZED|TRELLIS)\n(.*?)(?:#else\n(.*?))?#endif\n", re.S)
_INCLUDE = re.compile(r'#include "(\w+\.(?:h|inc))"\n')


class Text(NamedTuple):
    """header: what comes before the kernel's function. body: what is inside it."""

    header: str
    body: str


def folder() -> Traversable:
    """metal/, as the wheel carries it or as it lies in a checkout.

    Raises:
        KernelUnavailableError: neither is there.

    """
    checkout = Path(__file__).parents[2] / "metal"
    for place in (files("mlx_tq") / "metal", checkout):
        if (place / "tq_compat.h").is_file():
            return place
    raise KernelUnavailableError(
        f"the kernels' text is missing: {checkout} is no folder of kernels; install mlx_tq again."
    )


@cache
def text(name: str, where: str = "metal", *, normalized: bool = False, trellis: bool = False) -> Text:
    """The text of the kernel in metal/`name`.metal for "metal" or "cuda", its includes put in place, once each.

    Of parts between `#if TQ_NORMALIZED`, `#else` and `#endif` it has those for normalized keys, or for plain ones; of
    those behind `#if TQ_TRELLIS` those for trellis codes, or for others.
    mlx copies the text and compares it at every call, so comments, indents, empty lines and the other dialect are
    dropped. It also looks for names in the text, and would find them in comments.
    """
    seen: set[str] = set()
    wanted = {"NORMALIZED": normalized, "TRELLIS": trellis}

    def included(file: str) -> str:
        if file in seen:
            return ""
        seen.add(file)
        found = (folder() / file).read_text(encoding="utf-8")
        found = _PARTS.sub(lambda match: match.group(2 if wanted[match.group(1)] else 3) or "", found)
        return _INCLUDE.sub(lambda match: included(match.group(1)), found)

    whole = _DIALECTS.sub(lambda match: match.group(1 if where == "cuda" else 2), included(f"{name}.metal"))
    header, body = whole.split(_BODY)
    return Text(*(_INDENT.sub("\n", _COMMENT.sub("", part)) for part in (header, body)))
