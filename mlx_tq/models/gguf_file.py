"""The header of a GGUF file, and its tensors as mlx arrays.

The layout is that of ggml's GGUF specification, versions 2 and 3, little-endian. The `gguf` package takes half a minute
for a header with a vocabulary of 262,144 tokens, and does not terminate on some damaged files.

Q4_0, Q4_1 and Q8_0 are blocks of 32 values with an fp16 scale, and so are mlx's affine groups of 32: w = scale * code +
bias. They stay packed, with the same bits of codes in another order; other kinds become dense. Only scales and biases
are rounded, to the model's type: in float16 and float32 exactly, in bfloat16 by at most 1/256.
"""

import glob
import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_tq.errors import ConfigError, UnsupportedModelError

GROUP_SIZE = 32
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LENGTH = struct.Struct("<Q")  # of a string; compiled, since there are hundreds of thousands of strings
_ALIGNMENT, _MAX_DIMS = 32, 4
_MAX_INTEGER = 2**31 - 1  # of mlx's shapes
_MAX_QUOTED = 60  # characters of a value in a message
_PART_NAME = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")  # as llama.cpp names the parts of a split file
# ggml's numbers of types.
_F32, _F16, _BF16, _Q4_0, _Q4_1, _Q8_0 = 0, 1, 30, 2, 3, 8
_DENSE: dict[int, tuple[type, mx.Dtype]] = {
    _F32: (np.float32, mx.float32),
    _F16: (np.float16, mx.float16),
    _BF16: (np.uint16, mx.bfloat16),
}
_BLOCKS = {
    _Q4_0: np.dtype([("scale", "<f2"), ("codes", "u1", 16)]),
    _Q4_1: np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("codes", "u1", 16)]),
    _Q8_0: np.dtype([("scale", "<f2"), ("codes", "i1", GROUP_SIZE)]),
}
_BITS = {_Q4_0: 4, _Q4_1: 4, _Q8_0: 8}


@dataclass(frozen=True)
class Tensor:
    """The place of a tensor in its file, and how it is stored."""

    name: str  # such as blk.0.attn_q.weight
    shape: tuple[int, ...]  # rows first, as in NumPy
    kind: int
    start: int  # its first byte in the part
    part: int = 0  # of a split file, counted from 0

    @property
    def packed_bits(self) -> int | None:
        """The bits per value if the tensor stays packed, else None."""
        return _BITS.get(self.kind) if len(self.shape) == 2 else None

    @property
    def dense_dtype(self) -> mx.Dtype | None:
        """The dtype of a tensor that is not quantized, else None."""
        return _DENSE[self.kind][1] if self.kind in _DENSE else None


class Part(NamedTuple):
    """A file and its bytes, which are mapped and read when they are used."""

    path: Path
    data: NDArray[np.uint8]


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file with a parsed header, or the parts into which it was split."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]
    parts: tuple[Part, ...]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    def number(self, key: str, default: float | None = None) -> float:
        """Return a hyperparameter, which is stored under the architecture's name, for all layers or for each."""
        name = f"{self.architecture}.{key}"
        value = self.metadata.get(name, default)
        if value is None:
            raise damaged(self.path, f"it has no {short(name)}")
        if isinstance(value, list) and value:
            if any(number != value[0] for number in value):
                raise UnsupportedModelError(
                    f"the model {str(self.path)!r} has {name} = {short(value)}, and mlx-lm's {self.architecture} has "
                    "one number for all layers. Use another model."
                )
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise damaged(self.path, f"{name} is {short(value)}, not a number above 0")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a hyperparameter that is a whole number."""
        value = self.number(key, default)
        if not isinstance(value, int) or value > _MAX_INTEGER:
            raise damaged(self.path, f"{self.architecture}.{key} is {short(value)}, not a whole number up to 2^31 - 1")
        return value

    def rows(self, tensor: Tensor, block: int, block_bytes: int) -> NDArray[np.uint8]:
        """Return the bytes of a tensor, [rows, bytes per row], whose blocks of `block` values take `block_bytes`."""
        columns, rows = tensor.shape[-1], math.prod(tensor.shape[:-1])
        if columns % block:
            name = short(tensor.name)
            raise damaged(self.path, f"rows of {columns} values in {name} are not whole blocks of {block}")
        width = columns // block * block_bytes
        path, data = self.parts[tensor.part]
        if tensor.start + rows * width > len(data):
            raise damaged(path, f"it ends in the middle of {short(tensor.name)}")
        return data[tensor.start : tensor.start + rows * width].reshape(rows, width)

    def read(self, tensor: Tensor, dtype: mx.Dtype, minus: float = 0.0) -> dict[str, mx.array]:
        """Return `weight`, and if it stays packed `scales` and `biases`; `minus` is subtracted from a dense weight."""
        if tensor.packed_bits is not None:
            return self._read_packed(tensor, dtype)
        if tensor.kind in _DENSE:
            stored, stored_dtype = _DENSE[tensor.kind]
            dense = mx.array(self.rows(tensor, 1, np.dtype(stored).itemsize).view(stored))
            dense = dense.view(stored_dtype) if stored_dtype == mx.bfloat16 else dense
        else:
            dense = self._dequantize(tensor)
        return {"weight": (dense.astype(mx.float32) - minus if minus else dense).reshape(tensor.shape).astype(dtype)}

    def outline(self, tensor: Tensor, dtype: mx.Dtype) -> dict[str, mx.array]:
        """Return arrays of the shapes and dtypes that `read` returns; they take no memory until they are evaluated."""
        bits = tensor.packed_bits
        if bits is None:
            return {"weight": mx.zeros(tensor.shape, dtype)}
        rows, columns = tensor.shape
        scales = mx.zeros((rows, columns // GROUP_SIZE), dtype)
        return {"weight": mx.zeros((rows, columns * bits // 32), mx.uint32), "scales": scales, "biases": scales}

    def _read_packed(self, tensor: Tensor, dtype: mx.Dtype) -> dict[str, mx.array]:
        layout = _BLOCKS[tensor.kind]
        blocks = self.rows(tensor, GROUP_SIZE, layout.itemsize).view(layout)  # [rows, groups]
        scales = mx.array(blocks["scale"]).astype(dtype)
        codes: NDArray[np.uint8]
        if tensor.kind == _Q8_0:
            codes = blocks["codes"].view(np.uint8) ^ np.uint8(0x80)  # two's complement to the distance from -128
            biases = -128 * scales
        else:  # ggml has values i and i + 16 in a byte, mlx 2i and 2i + 1
            values = np.concatenate([blocks["codes"] & 0xF, blocks["codes"] >> 4], axis=-1)
            codes = values[..., 0::2] | values[..., 1::2] << 4
            biases = mx.array(blocks["minimum"]).astype(dtype) if tensor.kind == _Q4_1 else -8 * scales
        words = np.ascontiguousarray(codes.reshape(len(blocks), -1)).view("<u4")
        return {"weight": mx.array(words), "scales": scales, "biases": biases}

    def _dequantize(self, tensor: Tensor) -> mx.array:
        try:
            from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # an optional package
            from gguf.quants import dequantize  # an optional package
        except ImportError as error:
            raise ConfigError(
                f"{short(tensor.name)} of {str(self.path)!r} is stored in a kind that needs the gguf package. "
                "Run: pip install 'mlx-tq[gguf]'."
            ) from error
        try:
            kind = GGMLQuantizationType(tensor.kind)
            rows = self.rows(tensor, *GGML_QUANT_SIZES[kind])
            with np.errstate(all="ignore"):  # scales may be infinite, as in any other kind
                return mx.array(dequantize(rows, kind).astype(np.float32, copy=False))
        except (ValueError, NotImplementedError) as error:
            raise UnsupportedModelError(
                f"{short(tensor.name)} of {str(self.path)!r} cannot be dequantized by the gguf package: {error}. "
                "Use a file of a more common kind, such as Q4_K_M or Q8_0."
            ) from error


def damaged(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"the model {str(path)!r} cannot be loaded: {reason}. Download or convert it again.")


def short(value: object) -> str:
    """Return the first characters of a value of a file, for a message."""
    text = str(value)
    shown = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text[:_MAX_QUOTED])
    return shown if len(text) <= _MAX_QUOTED else f"{shown}..."


class _Reader:
    """Reads the values of a header one after another."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._data, self.position = data.data, len(_MAGIC)

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        values = struct.unpack_from(layout, self._data, self.position)
        self.position += struct.calcsize(layout)
        return values

    def number(self, code: str) -> Any:
        return self.numbers(code, 1)[0]

    def string(self) -> str:
        start = self.position + _LENGTH.size
        end = start + _LENGTH.unpack_from(self._data, self.position)[0]
        if end > len(self._data):
            raise struct.error("a string without its end")
        self.position = end
        return str(self._data[start:end], "utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.number(_NUMBERS[kind])
        inner, count = self.number("I"), self.number("Q")
        return [self.string() for _ in range(count)] if inner == _STRING else list(self.numbers(_NUMBERS[inner], count))

    def tensor(self) -> Tensor:
        """Return the next tensor, with its start relative to the first one's."""
        name, dims = self.string(), self.number("I")
        if not 0 < dims <= _MAX_DIMS:
            raise ValueError(f"{short(name)} has {dims} dimensions")
        shape = self.numbers("Q", dims)[::-1]
        if not all(0 < size <= _MAX_INTEGER for size in shape):
            raise ValueError(f"{short(name)} has the shape {shape}")
        return Tensor(name, shape, self.number("I"), self.number("Q"))


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a GGUF file, or raise ConfigError if it is none, cut off or damaged.

    A split file is read from all parts, whichever of them is given.
    """
    given = _read_part(path)
    count = given.metadata.get("split.count", 1)
    if not isinstance(count, int) or count < 2:
        return given
    files = [_read_part(part) for part in _find_parts(path, given.metadata.get("split.no"), count)]
    tensors: dict[str, Tensor] = {}
    for number, file in enumerate(files):
        if (file.metadata.get("split.no"), file.metadata.get("split.count")) != (number, count):
            raise damaged(file.path, f"it is not part {number + 1} of {count}")
        tensors |= {tensor.name: replace(tensor, part=number) for tensor in file.tensors.values()}
    total = files[0].metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise damaged(path, f"its {count} parts have {len(tensors)} tensors, not {short(total)}")
    return GgufFile(path, files[0].metadata, tensors, tuple(file.parts[0] for file in files))


def part_files(path: Path) -> list[Path]:
    """Return the files that are named as parts of the same split file, the first part first; else `path` alone."""
    match = _PART_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    return sorted(path.parent.glob(f"{glob.escape(match[1])}-{5 * '[0-9]'}-of-{match[2]}.gguf"))


def _find_parts(path: Path, number: Any, count: int) -> Iterator[Path]:
    """Yield the files of all parts; raise ConfigError for a part that is not there."""
    match = _PART_NAME.fullmatch(path.name)
    this = f"{str(path)!r} is part {short(number + 1 if isinstance(number, int) else number)} of {count}"
    join = "join them with llama-gguf-split --merge FIRST_PART model.gguf"
    if match is None or int(match[2]) != count:
        raise ConfigError(
            f"{this} of a split GGUF file, and its name does not end in -00001-of-{count:05}.gguf, as that of the "
            f"first part. Give the parts their names back, or {join}."
        )
    for index in range(count):
        part = path.with_name(f"{match[1]}-{index + 1:05}-of-{count:05}.gguf")
        if not part.is_file():
            raise ConfigError(
                f"{this} of a split GGUF file, and {part.name} is not next to it. Put all parts into one folder, or "
                f"{join}."
            )
        yield part


def _read_part(path: Path) -> GgufFile:
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ConfigError(f"{str(path)!r} is not a GGUF file: it does not begin with the letters GGUF.")
    data = np.memmap(path, mode="r")
    reader = _Reader(data)
    try:
        version = reader.number("I")
        if version not in _VERSIONS:
            raise ConfigError(
                f"{str(path)!r} is a GGUF file of version {version}; valid are {_VERSIONS}, little-endian."
            )
        tensor_count, key_count = reader.number("Q"), reader.number("Q")
        metadata = {reader.string(): reader.value(reader.number("I")) for _ in range(key_count)}
        tensors = [reader.tensor() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"its alignment is {short(alignment)}")
        first = math.ceil(reader.position / alignment) * alignment
    except struct.error as error:
        raise damaged(path, "it ends in the middle of its header") from error
    except (KeyError, ValueError) as error:  # such as an unknown kind of value
        raise damaged(path, f"its header is damaged ({error})") from error
    placed = {tensor.name: replace(tensor, start=first + tensor.start) for tensor in tensors}
    return GgufFile(path, metadata, placed, (Part(path, data),))
