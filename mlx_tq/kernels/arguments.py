"""Arguments that tell a kernel about codecs, rotations and normalized keys, and what kernels support."""

from functools import lru_cache

import mlx.core as mx

from mlx_tq.codec.formats import Codec, trellis
from mlx_tq.codec.formats.base import SCALE_RULES
from mlx_tq.codec.formats.scalar import FullCodec
from mlx_tq.codec.formats.sorted_pairs import SortedCodec
from mlx_tq.codec.formats.trellis import TrellisCodec
from mlx_tq.codec.formats.turbo import TurboCodec
from mlx_tq.codec.grouped_rotation import rotation_of_one_group
from mlx_tq.codec.normalization import KeyNormalization
from mlx_tq.codec.rotation import Rotation, WalshHadamard, hadamard_matrix, split_order
from mlx_tq.codec.rows import RowLayout
from mlx_tq.kernels.gpu import Constant, Constants, UnsupportedByKernelError

_LANES = 32
MAX_DIM = 512
MIN_SIZE = 8  # mlx passes smaller arrays in another address space, for which the text would not compile


def can_rotate(rotation: Rotation | None) -> bool:
    """Return whether kernels have a rotation: Walsh-Hadamard, D = m 2^k up to 512, 2^k at most 32 where m > 1."""
    if not isinstance(rotation, WalshHadamard) or rotation.dim > MAX_DIM:
        return False
    return rotation.order == 1 or rotation.power <= _LANES


def can_run(layout: RowLayout) -> bool:
    return _is_supported(layout.key) and _is_supported(layout.value)


def _is_supported(codec: Codec) -> bool:
    rotation = rotation_of_one_group(codec.rotation)
    return codec.has_kernels and codec.head_dim <= MAX_DIM and (rotation is None or can_rotate(rotation))


def check_can_run(layout: RowLayout, *dtypes: mx.Dtype) -> None:
    for part, codec in (("key", layout.key), ("value", layout.value)):
        if not _is_supported(codec):
            raise UnsupportedByKernelError(
                f"kernels cannot read {part}s of {type(codec).__name__} with head size {codec.head_dim} and rotation "
                f"{type(codec.rotation).__name__}; they support fp16, q8, tq, tcq and stcq of 2 to 4 bits up to head "
                f"size {MAX_DIM} with the Walsh-Hadamard rotation. Other formats need the reference backend."
            )
    for dtype in dtypes:
        if dtype not in (mx.float16, mx.bfloat16, mx.float32):
            raise UnsupportedByKernelError(
                f"kernels cannot compute in {dtype}; they support float16, bfloat16 and float32. Other dtypes need the "
                "reference backend."
            )


def layout_constants(layout: RowLayout) -> Constants:
    return (*codec_constants("KEY", layout.key), *codec_constants("VALUE", layout.value))


def place_constants(layout: RowLayout) -> Constants:
    """Return where attention finds the parts of a row, in 16-bit words."""
    (_, key_scale), (value, value_scale) = layout.starts
    return (
        ("VALUE_START", value),
        ("KEY_SCALE_START", key_scale),
        ("VALUE_SCALE_START", value_scale),
        ("ROW_WORDS", 2 * layout.words),
    )


def codec_constants(prefix: str, codec: Codec) -> Constants:
    rule = codec.rule if isinstance(codec, TurboCodec) else SCALE_RULES[0]
    values: dict[str, Constant] = {
        "DIM": codec.head_dim,
        "ORDER": codec.rotation.order if isinstance(codec.rotation, WalshHadamard) else 1,
        "BITS": 16 * codec.words // codec.head_dim,
        "RULE": SCALE_RULES.index(rule),
        "ROTATED": codec.rotation is not None,
        "WIDE": codec.scale_dtype is not None and codec.scale_dtype == mx.float32,
        "TRELLIS": has_states(codec),
        # The dtype of values that are stored in 16 bits as they are.
        "FULL": codec.dtype if isinstance(codec, FullCodec) and codec.dtype.size == 2 else mx.float16,
    }
    if isinstance(codec, SortedCodec):
        order, _ = split_order(codec.head_dim) or (codec.head_dim, 1)
        values |= {"SORTED": True, "ORDER": order}
    return tuple((f"{prefix}_{name}", value) for name, value in values.items())


def has_states(codec: Codec) -> bool:
    """Return whether codes are states of a trellis."""
    return isinstance(codec, TrellisCodec | SortedCodec)


def count_units(codec: Codec) -> int:
    """Return the units of a vector, see metal/units.h: one for each word, three words of 3-bit codes, or fp32 value.

    Keys of sorted dims have one for 16 values.
    """
    if isinstance(codec, SortedCodec):
        return codec.head_dim // 16
    bits = 16 * codec.words // codec.head_dim
    return codec.words // {3: 3, 32: 2}.get(bits, 1)


def normalization_constants(normalization: KeyNormalization | None, dtype: mx.Dtype) -> Constants:
    normalized = normalization is not None
    return (("NORMALIZED", normalized), ("CLAMPED", normalized and dtype == mx.float16))


def trellis_levels(*codecs: Codec) -> list[mx.array]:
    return [trellis.all_levels()] if any(map(has_states, codecs)) else []


def key_groups(codec: Codec, batch: int, heads: int) -> list[mx.array]:
    """Return the input `key_groups` of metal/sorted_keys.h, or none for keys whose dims are not sorted."""
    if not isinstance(codec, SortedCodec):
        return []
    placed = codec.groups.placed
    return [mx.contiguous(mx.broadcast_to(placed, (batch, heads, placed.shape[2])))]


def normalization_inputs(normalization: KeyNormalization | None, tokens: int) -> list[mx.array]:
    """Return the inputs `key_scale`, `key_means` and `mean_index`, or none for plain keys."""
    if normalization is None:
        return []
    index = pad_input(normalization.mean_index(tokens))
    return [mx.contiguous(normalization.scale), mx.contiguous(normalization.means), index]


def small_input(numbers: list[int] | list[float], dtype: mx.Dtype = mx.int32) -> mx.array:
    """Return numbers as an input of at least MIN_SIZE values."""
    return mx.array(numbers + [0] * (MIN_SIZE - len(numbers)), dtype)


def pad_input(array: mx.array) -> mx.array:
    """Append zeros to the last axis of an array that has less than MIN_SIZE values."""
    if array.size >= MIN_SIZE:
        return array
    return mx.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, MIN_SIZE - array.size)])


def sign_flips(rotation: Rotation | None) -> mx.array:
    """Return the bits of sign flips in the layout of metal/rotation.h, uint32 [at least 8]; zeros for no rotation."""
    return _sign_flips(rotation_of_one_group(rotation))


@lru_cache(maxsize=1024)
def _sign_flips(rotation: Rotation | None) -> mx.array:
    words: list[int] = []
    if isinstance(rotation, WalshHadamard):
        signs: list[float] = rotation.signs.tolist()  # type: ignore[assignment]
        matrix = hadamard_matrix(rotation.order)
        words = [_negative_bits(signs[start : start + _LANES]) for start in range(0, rotation.dim, _LANES)]
        words += [_negative_bits(row) for row in (*matrix.tolist(), *matrix.T.tolist())]
    return small_input(words, mx.uint32)


def _negative_bits(signs: list[float]) -> int:
    return sum(1 << i for i, sign in enumerate(signs) if sign < 0)
