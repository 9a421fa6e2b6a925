"""Pack codes of 1 to 4 bits into 16-bit words, plane by plane.

Planes are contiguous runs of dims; word i holds element i of each plane, so a decoder needs only shifts and masks.

1, 2, 4 bits: 16 / bits planes in one word, plane 0 in the lowest bits.
3 bits: 16 planes in three runs of D / 16 words: five planes each in bits 0-14, and one bit of plane 15 in bit 15, its
lowest in the first run. No code straddles a word.
"""

import math

import mlx.core as mx

_THREE = 5  # 3-bit codes in one word, below its bit 15


def plane_count(bits: int) -> int:
    """Return how many codes fill whole words."""
    return 16 // math.gcd(16, bits)


def pack(codes: mx.array, bits: int) -> mx.array:
    """Pack codes: uint16 [..., D] -> uint16 [..., D bits / 16]."""
    planes = list(mx.split(codes.astype(mx.uint16), plane_count(bits), axis=-1))
    if bits != 3:
        return _pack_planes(planes, bits)
    words = [_pack_planes(planes[_THREE * w : _THREE * (w + 1)], bits) for w in range(3)]
    return mx.concatenate([word | (((planes[15] >> w) & 1) << 15) for w, word in enumerate(words)], axis=-1)


def _pack_planes(planes: list[mx.array], bits: int) -> mx.array:
    word = planes[0]
    for j, plane in enumerate(planes[1:], start=1):
        word = word | (plane << (bits * j))
    return word


def split_words(codes: mx.array, bits: int, axis: int = -1) -> list[mx.array]:
    """Split words along `axis` into the runs that `unpack` takes: three for 3 bits, else one."""
    return list(mx.split(codes, 3, axis=axis)) if bits == 3 else [codes]


def unpack(words: list[mx.array], bits: int) -> list[mx.array]:
    """Return the planes of packed words in dim order: uint16 [..., D / planes] each."""
    mask = 2**bits - 1
    if bits != 3:
        return [(words[0] >> (bits * j)) & mask for j in range(plane_count(bits))]
    planes = [(word >> (bits * j)) & mask for word in words for j in range(_THREE)]
    top = [word >> 15 for word in words]
    return [*planes, top[0] | (top[1] << 1) | (top[2] << 2)]
