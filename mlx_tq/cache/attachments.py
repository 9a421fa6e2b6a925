"""Bytes behind the arrays of a safetensors file, as one more array of uint8, of which nobody holds all in memory."""

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

NAME = "attached"  # of the array; its parts' sizes are in the file's metadata under the same name


def attach(source: Path, target: Path, sizes: Sequence[int], parts: Iterable[bytes]) -> None:
    """Write the safetensors file `source` to `target`, with parts of these sizes behind its arrays.

    Raises:
        OSError: one of them cannot be read or written.
    """
    with source.open("rb") as old, target.open("wb") as new:
        header = _header(old)
        end = max((about["data_offsets"][1] for name, about in header.items() if name != "__metadata__"), default=0)
        total = sum(sizes)
        header[NAME] = {"dtype": "U8", "shape": [total], "data_offsets": [end, end + total]}
        header["__metadata__"] = header.get("__metadata__", {}) | {NAME: json.dumps(list(sizes))}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        new.write(len(text).to_bytes(8, "little") + text)
        shutil.copyfileobj(old, new)
        for part in parts:
            new.write(part)


def attached(path: Path) -> Iterator[bytes]:
    """The parts behind the arrays of a safetensors file, one by one; none where there are none.

    A file that ends early gives shorter parts.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no safetensors file.
    """
    with path.open("rb") as file:
        header = _header(file)
        if NAME not in header:
            return
        file.seek(header[NAME]["data_offsets"][0], 1)
        for size in json.loads(header["__metadata__"][NAME]):
            yield file.read(size)


def _header(file: BinaryIO) -> dict[str, Any]:
    """What a file says of its arrays; it stands at their first byte then."""
    length = int.from_bytes(file.read(8), "little")
    header: dict[str, Any] = json.loads(file.read(length))
    return header
