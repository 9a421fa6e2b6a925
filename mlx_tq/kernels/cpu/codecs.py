"""Codecs and rotations as the CPU kernels take them."""

import ctypes
import os
from functools import cache
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from mlx_tq.codec.codebook import levels
from mlx_tq.codec.formats import Codec
from mlx_tq.codec.formats.scalar import FullCodec
from mlx_tq.codec.formats.sorted_pairs import Groups, SortedCodec
from mlx_tq.codec.formats.trellis import TrellisCodec, all_levels
from mlx_tq.codec.grouped_rotation import rotation_of_one_group
from mlx_tq.codec.rotation import Rotation, WalshHadamard, hadamard_matrix

FULL_FORMATS = {mx.float32: 0, mx.float16: 1, mx.bfloat16: 2}
_Q8, _TQ4, _TCQ4, _STCQ4 = 3, 4, 7, 14
pointer, long, int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class RotationStruct(ctypes.Structure):
    """Mirror of `Rotation` in rotation.h."""

    _fields_ = (("signs", pointer), ("matrix", pointer), ("order", int32), ("padding", int32))


def format_number(codec: Codec) -> int:
    if isinstance(codec, FullCodec):
        return FULL_FORMATS[codec.dtype]
    bits = 16 * codec.words // codec.head_dim
    if bits == 8:
        return _Q8
    first = _STCQ4 if isinstance(codec, SortedCodec) else _TCQ4 if isinstance(codec, TrellisCodec) else _TQ4
    return first + 4 - bits


class KeyGroupsStruct(ctypes.Structure):
    """Mirror of `KeyGroups` in formats.h."""

    _fields_ = (("order", pointer), ("sizes", pointer), ("widths", pointer))


def groups_struct(codec: Codec, batch: int, heads: int, first: int = 0) -> KeyGroupsStruct:
    """Describe the groups of sorted keys of some heads, from row `first` of the batch on; nothing for other formats."""
    if not isinstance(codec, SortedCodec):
        return KeyGroupsStruct()
    groups, key = codec.groups, (batch, heads, first)
    described = _groups_structs.setdefault(groups, {})
    if key not in described:
        described[key] = _describe_groups(groups, *key)
    return described[key]


_groups_structs: WeakKeyDictionary[Groups, dict[tuple[int, int, int], KeyGroupsStruct]] = WeakKeyDictionary()


def _describe_groups(groups: Groups, batch: int, heads: int, first: int) -> KeyGroupsStruct:
    arrays = [
        of_all_heads(array, dtype, batch, heads)[first:]
        for array, dtype in ((groups.order, np.uint16), (groups.sizes, np.float32), (groups.widths, np.int32))
    ]
    struct = KeyGroupsStruct(*(array.ctypes.data for array in arrays))
    struct.arrays = arrays  # alive as long as the addresses
    return struct


def of_all_heads(array: np.ndarray, dtype: type, batch: int, heads: int) -> np.ndarray:
    """Repeat what is the same for all heads [1, 1, n], or return what they have, contiguous [B, H, n]."""
    return np.ascontiguousarray(np.broadcast_to(array, (batch, heads, array.shape[2])), dtype)


def rotation_struct(rotation: Rotation | None) -> RotationStruct:
    return _rotation_struct(rotation_of_one_group(rotation))  # that of all groups belongs to one cache


@cache
def _rotation_struct(rotation: Rotation | None) -> RotationStruct:
    if not isinstance(rotation, WalshHadamard):  # `check_can_run` refuses other rotations
        return RotationStruct(None, None, 1, 0)
    signs = np.array(rotation.signs)
    matrix = np.ascontiguousarray(hadamard_matrix(rotation.order), np.float32)
    struct = RotationStruct(signs.ctypes.data, matrix.ctypes.data, rotation.order, 0)
    struct.arrays = signs, matrix  # alive as long as the addresses
    return struct


@cache
def _level_tables() -> np.ndarray:
    turbo = [np.resize(levels(bits), 16) for bits in (2, 3, 4)]
    trellis = np.array(all_levels())
    planes = trellis.view(np.uint8).reshape(len(trellis), -1, 2).swapaxes(1, 2)
    floats = np.concatenate([*turbo, trellis.ravel()]).astype(np.float32)
    return np.concatenate([floats.view(np.uint8), planes.ravel()])


@cache
def levels_address() -> int:
    """Return the address of `Levels` in formats.h."""
    return _level_tables().ctypes.data


def thread_count() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
