"""fp32 sums in one fixed order, so that every backend, batch shape and chunk size gets the same bits.

A library reduction is free to add in any order, and a code that lies on a boundary then depends on the machine. Here
a vector of D = m 2^k values is read as m rows of 2^k: neighbours are added in pairs along a row (k stages), then the m
rows are added left to right. The kernels in metal/ add in the same order.
"""

import mlx.core as mx
import numpy as np

# The orders m of a Hadamard matrix for which D = m 2^k is accepted (the sizes of mx.hadamard_transform).
ORDERS = (1, 12, 20, 28)

# Williamson's construction: four circulant blocks, given by their first rows.
_WILLIAMSON = {
    20: ("+----", "+----", "++--+", "+-++-"),
    28: ("+------", "++----+", "+-+--+-", "+--++--"),
}
_ORDER_12 = (
    "+-++++++++++",
    "--+-+-+-+-+-",
    "+++-++----++",
    "+---+--+-++-",
    "+++++-++----",
    "+-+---+--+-+",
    "++--+++-++--",
    "+--++---+--+",
    "++----+++-++",
    "+--+-++---+-",
    "++++----+++-",
    "+-+--+-++---",
)


def _signs(row: str) -> list[float]:
    return [1.0 if sign == "+" else -1.0 for sign in row]


def hadamard_matrix(order: int) -> np.ndarray:
    """The Hadamard matrix of an order in ORDERS, entries +-1, float64 [m, m]; symmetric for 1 and 12 only."""
    if order == 1:
        return np.ones((1, 1))
    if order == 12:
        return np.array([_signs(row) for row in _ORDER_12])
    a, b, c, d = (np.array([np.roll(_signs(row), shift) for shift in range(len(row))]) for row in _WILLIAMSON[order])
    return np.block([[a, b, c, d], [-b, a, -d, c], [-c, d, a, -b], [-d, -c, b, a]])


def split_order(dim: int) -> tuple[int, int] | None:
    """Write `dim` as (m, 2^k) with m in ORDERS, or None where that cannot be done."""
    for order in ORDERS:
        power, rest = divmod(dim, order)
        if dim > 0 and rest == 0 and power & (power - 1) == 0:
            return order, power
    return None


def hadamard(x: mx.array, *, transpose: bool = False) -> mx.array:
    """Multiply by the unnormalised Hadamard matrix H_m (x) H_(2^k) along the last axis: fp32 [..., D] -> [..., D].

    The 2^k-point butterflies run with strides 1, 2, 4, ..., then the m-point transform across the m rows.
    """
    dim = x.shape[-1]
    order, power = split_order(dim) or (0, 0)
    lead = x.shape[:-1]
    x = x.reshape(*lead, order, power)
    for _ in range(power.bit_length() - 1):
        even, odd = x[..., 0::2], x[..., 1::2]
        x = mx.concatenate([even + odd, even - odd], axis=-1)
    if order > 1:
        matrix = hadamard_matrix(order).astype(np.float32)
        columns = mx.array(matrix if transpose else matrix.T)[:, :, None]  # column j holds the signs of row j of x
        total = x[..., 0:1, :] * columns[0]
        for j in range(1, order):
            total = total + x[..., j : j + 1, :] * columns[j]
        x = total
    return x.reshape(*lead, dim)


def pairwise_sum(x: mx.array) -> mx.array:
    """Sum along the last axis in the fixed order: fp32 [..., D] -> [...]."""
    order, power = split_order(x.shape[-1]) or (x.shape[-1], 1)
    x = x.reshape(*x.shape[:-1], order, power)
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    x = x[..., 0]
    total = x[..., 0]
    for j in range(1, x.shape[-1]):
        total = total + x[..., j]
    return total
