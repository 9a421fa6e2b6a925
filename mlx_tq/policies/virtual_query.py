"""The virtual query of a head, and what its queries scatter around it.

Source: TriAttention (Mao et al., arXiv 2604.04921) section 4, equations of the trigonometric and the norm score.
"""

import mlx.core as mx

from mlx_tq.policies.queries import QueryStats
from mlx_tq.policies.rope import Rope

# How far ahead of the last token the virtual query looks.
OFFSETS = tuple(1 << i for i in range(17))


def virtual_query(rope: Rope, centre: mx.array, last: int, *, unrotated: bool = True) -> mx.array:
    """The mean of `centre` [..., D] at the positions `last` + OFFSETS: fp32 [..., D].

    Unless `unrotated`, the dims that RoPE leaves alone are zero.
    """
    turned = rope.turn(rope.ahead(centre, OFFSETS), last)
    if not unrotated and rope.free.size:
        turned[..., rope.free] = 0
    return turned


def spread(rope: Rope, stats: QueryStats) -> mx.array:
    """What queries scatter around their centre, (a_f - |c_f|)+ of each pair: fp32 [Hq, F]."""
    return mx.maximum(stats.amplitude - rope.lengths(stats.centre), 0) * rope.gain
