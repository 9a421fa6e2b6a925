"""The header of a GGUF file: what it says of a model, and where the tensors lie.

The layout is that of ggml's GGUF specification, versions 2 and 3, little-endian. The `gguf` package reads it too, in
half a minute where a vocabulary has 262,144 tokens, and does not end on some damaged files.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_tq.errors import ConfigError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LENGTH = struct.Struct("<Q")  # of a string, of which there are hundreds of thousands
_ALIGNMENT, _MOST_DIMS = 32, 4


@dataclass(frozen=True)
class Tensor:
    """Where a tensor lies in its file.

    Attributes:
        name: in the file, such as blk.0.attn_q.weight.
        shape: rows first, as NumPy has it.
        kind: ggml's number of how it is stored.
        start: its first byte in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file whose header was read.

    Attributes:
        path: of the file.
        metadata: numbers, booleans, strings and lists of them, by key.
        tensors: by name.
        data: all bytes, mapped and not yet read.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]
    data: NDArray[np.uint8]

    def rows(self, tensor: Tensor, block: int, block_bytes: int) -> NDArray[np.uint8]:
        """The bytes of a tensor, [rows, bytes of a row].

        Args:
            tensor: of this file.
            block: how many values are stored together.
            block_bytes: what they take.

        Raises:
            ConfigError: the file ends before the tensor does, or its rows are no whole blocks.
        """
        columns, rows = tensor.shape[-1], math.prod(tensor.shape[:-1])
        if columns % block:
            raise damaged(self.path, f"rows of {columns} values in {tensor.name} are no whole blocks of {block}")
        width = columns // block * block_bytes
        if tensor.start + rows * width > len(self.data):
            raise damaged(self.path, f"it ends in the middle of {tensor.name}")
        return self.data[tensor.start : tensor.start + rows * width].reshape(rows, width)


def damaged(path: Path, reason: str) -> ConfigError:
    """The error of a file that cannot be what it says."""
    return ConfigError(f"the model {str(path)!r} cannot be loaded: {reason}. Download or convert it again.")


class _Header:
    """Reads one value after another, from behind the first letters."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._data, self.position = data.data, len(_MAGIC)

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        form = f"<{count}{code}"
        found = struct.unpack_from(form, self._data, self.position)
        self.position += struct.calcsize(form)
        return found

    def number(self, code: str) -> Any:
        return self.numbers(code, 1)[0]

    def text(self) -> str:
        begin = self.position + _LENGTH.size
        end = begin + _LENGTH.unpack_from(self._data, self.position)[0]
        if end > len(self._data):
            raise struct.error("a string without its end")
        self.position = end
        return str(self._data[begin:end], "utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.number(_NUMBERS[kind])
        inner, count = self.number("I"), self.number("Q")
        return [self.text() for _ in range(count)] if inner == _STRING else list(self.numbers(_NUMBERS[inner], count))

    def tensor(self) -> Tensor:
        """The next tensor, its start counted from the first one's."""
        name, dims = self.text(), self.number("I")
        if not 0 < dims <= _MOST_DIMS:
            raise ValueError(f"{name} has {dims} dimensions")
        return Tensor(name, self.numbers("Q", dims)[::-1], self.number("I"), self.number("Q"))


def read_header(path: Path) -> GgufFile:
    """Read what a file says of itself.

    Raises:
        ConfigError: it is no GGUF file, of an unknown version, cut off or damaged.
    """
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ConfigError(f"{str(path)!r} is no GGUF file: it does not begin with the letters GGUF.")
    data = np.memmap(path, mode="r")
    header = _Header(data)
    try:
        version = header.number("I")
        if version not in _VERSIONS:
            raise ConfigError(
                f"{str(path)!r} is a GGUF file of version {version}; valid are {_VERSIONS}, little-endian."
            )
        tensor_count, key_count = header.number("Q"), header.number("Q")
        metadata = {header.text(): header.value(header.number("I")) for _ in range(key_count)}
        relative = [header.tensor() for _ in range(tensor_count)]
        alignment = int(metadata.get("general.alignment", _ALIGNMENT))
        first = math.ceil(header.position / alignment) * alignment
    except struct.error as error:
        raise damaged(path, "it ends in the middle of its header") from error
    except (KeyError, ValueError, TypeError, ZeroDivisionError) as error:  # a kind of value that there is not
        raise damaged(path, f"its header is damaged ({error})") from error
    tensors = {each.name: Tensor(each.name, each.shape, each.kind, first + each.start) for each in relative}
    return GgufFile(path, metadata, tensors, data)
