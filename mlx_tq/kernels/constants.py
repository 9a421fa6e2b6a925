"""What a kernel must know about a codec: the constants of its text, and which values its rotation flips."""

from functools import lru_cache

import mlx.core as mx

from mlx_tq.codec.formats import Codec, trellis
from mlx_tq.codec.formats.base import SCALE_RULES
from mlx_tq.codec.formats.scalar import FullCodec
from mlx_tq.codec.formats.trellis import TrellisCodec
from mlx_tq.codec.formats.turbo import TurboCodec
from mlx_tq.codec.normalization import KeyNormalization
from mlx_tq.codec.rotation import Rotation, WalshHadamard, hadamard_matrix, split_order
from mlx_tq.codec.rows import RowLayout
from mlx_tq.errors import KernelUnavailableError
from mlx_tq.kernels.build import Constant, Constants, Kernel

_STREAMS = 32
_LARGEST = 512
# mlx passes arrays of fewer values in another address space, which would be another kernel.
LEAST = 8


def can_rotate(rotation: Rotation | None) -> bool:
    """Whether kernels have the transform: Walsh-Hadamard, D = m 2^k up to 512 with 2^k at most 32 where m > 1."""
    if not isinstance(rotation, WalshHadamard) or rotation.dim > _LARGEST:
        return False
    order, power = split_order(rotation.dim) or (0, 0)
    return order == 1 or 0 < power <= _STREAMS


def can_run(layout: RowLayout) -> bool:
    """Whether kernels have both formats of a layout."""
    return all(_known(codec) for codec in (layout.key, layout.value))


def check_can_rotate(rotation: Rotation | None) -> None:
    """Raise where kernels lack a rotation.

    Raises:
        KernelUnavailableError: they do, with what they have.

    """
    if not can_rotate(rotation):
        raise KernelUnavailableError(
            f"kernels cannot rotate by {type(rotation).__name__}({rotation and rotation.dim}); they have the "
            f"Walsh-Hadamard rotation up to head size {_LARGEST}. Use mlx's own operations."
        )


def check_can_run(layout: RowLayout, *dtypes: mx.Dtype) -> None:
    """Raise where kernels lack a format of a layout, or a type of queries, keys or values.

    Raises:
        KernelUnavailableError: they do; what names it, and what they have.

    """
    for part, codec in (("key", layout.key), ("value", layout.value)):
        if not _known(codec):
            raise KernelUnavailableError(
                f"kernels cannot read {part}s of {type(codec).__name__} with head size {codec.head_dim} and rotation "
                f"{type(codec.rotation).__name__}; they have fp16, q8, tq and tcq of 2 to 4 bits up to head size "
                f"{_LARGEST} and the Walsh-Hadamard rotation. Use mlx's own operations for this layer."
            )
    for dtype in dtypes:
        if dtype not in (mx.float16, mx.bfloat16, mx.float32):
            raise KernelUnavailableError(
                f"kernels cannot compute in {dtype}; they take float16, bfloat16 and float32. Use mlx's own operations."
            )


def _known(codec: Codec) -> bool:
    fits = codec.head_dim <= _LARGEST if codec.rotation is None else can_rotate(codec.rotation)
    return codec.has_kernels and fits


def layout_constants(layout: RowLayout) -> Constants:
    """The constants KEY_... and VALUE_... of a layout; see `codec_constants`."""
    return (*codec_constants("KEY", layout.key), *codec_constants("VALUE", layout.value))


def codec_constants(prefix: str, codec: Codec) -> Constants:
    """PREFIX_...: DIM, ORDER, BITS, RULE, ROTATED, WIDE, TRELLIS and FULL."""
    order, _ = split_order(codec.head_dim) or (1, 0)
    rule = codec.rule if isinstance(codec, TurboCodec) else SCALE_RULES[0]
    values: dict[str, Constant] = {
        "DIM": codec.head_dim,
        "ORDER": order if codec.rotation else 1,
        "BITS": 16 * codec.words // codec.head_dim,
        "RULE": SCALE_RULES.index(rule),
        "ROTATED": codec.rotation is not None,
        "WIDE": codec.scale_dtype is not None and codec.scale_dtype == mx.float32,
        "TRELLIS": isinstance(codec, TrellisCodec),
        # The 16-bit type that is stored as it is; some such type where there is none.
        "FULL": codec.dtype if isinstance(codec, FullCodec) and codec.dtype.size == 2 else mx.float16,
    }
    return tuple((f"{prefix}_{name}", value) for name, value in values.items())


def has_trellis(*codecs: Codec) -> bool:
    """Whether kernels of any of these codecs search or read a trellis."""
    return any(isinstance(codec, TrellisCodec) for codec in codecs)


def with_levels(kernel: Kernel, *codecs: Codec) -> tuple[Kernel, list[mx.array]]:
    """A kernel, and what it is given behind its inputs: the levels of a trellis where a codec has one."""
    if not has_trellis(*codecs):
        return kernel, []
    return kernel.with_more(inputs=("trellis_levels",)), [trellis.all_levels()]


def table(numbers: list[int] | list[float], dtype: mx.Dtype = mx.int32) -> mx.array:
    """Numbers for a kernel, zeros after them where they are few."""
    return mx.array(numbers + [0] * (LEAST - len(numbers)), dtype)


def means_inputs(normalization: KeyNormalization | None, tokens: int) -> list[mx.array]:
    """Weights, means, and which one each of the first rows has, for a kernel; none where keys are plain."""
    if normalization is None:
        return []
    return [
        mx.contiguous(normalization.scale),
        mx.contiguous(normalization.means),
        filled(normalization.mean_index(tokens)),
    ]


def filled(numbers: mx.array) -> mx.array:
    """An array for a kernel: itself, or with zeros after its last axis where it is short."""
    if numbers.size >= LEAST:
        return numbers
    return mx.pad(numbers, [(0, 0)] * (numbers.ndim - 1) + [(0, LEAST - numbers.size)])


def flips(rotation: Rotation | None) -> mx.array:
    """Which values a rotation flips, in the layout of metal/rotation.h: uint32 [at least 8]; zeros for none."""
    return _flips(rotation if isinstance(rotation, WalshHadamard) else None)


@lru_cache(maxsize=1024)
def _flips(rotation: WalshHadamard | None) -> mx.array:
    words: list[int] = []
    if rotation is not None:
        signs: list[float] = rotation.signs.tolist()  # type: ignore[assignment]
        order, _ = split_order(rotation.dim) or (1, 0)
        matrix = hadamard_matrix(order)
        words = [_mask(signs[start : start + _STREAMS]) for start in range(0, rotation.dim, _STREAMS)]
        words += [_mask(row) for row in matrix.tolist()] + [_mask(column) for column in matrix.T.tolist()]
    return mx.array(words + [0] * (LEAST - len(words)), mx.uint32)


def _mask(signs: list[float]) -> int:
    """Bit i is set where the i-th sign is negative."""
    return sum(1 << i for i, sign in enumerate(signs) if sign < 0)
