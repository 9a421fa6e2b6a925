"""How sure a share is, and whether two that were counted on the same samples differ."""

from math import comb, sqrt

_Z95 = 1.959964  # standard deviations that hold 95 % of a normal distribution


def wilson(hits: int, asked: int) -> tuple[float, float]:
    """The 95 % interval of a share, 0 to 1 (Wilson 1927): no wider than that, and sound near 0 and 1."""
    share, spread = hits / asked, _Z95**2 / asked
    middle = (share + spread / 2) / (1 + spread)
    half = _Z95 * sqrt(share * (1 - share) / asked + spread / (4 * asked)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def mcnemar(lost: int, gained: int) -> float:
    """The exact two-sided p-value that as many samples are lost as gained (McNemar 1947).

    Args:
        lost: samples that only the first of two got right.
        gained: samples that only the second did.
    """
    changed = lost + gained
    tail = sum(comb(changed, fewer) for fewer in range(min(lost, gained) + 1))
    return min(1.0, 2 * tail / (1 << changed))
