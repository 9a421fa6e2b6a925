"""Walsh-Hadamard rotation of queries, full-precision keys, and outputs."""

import mlx.core as mx

from mlx_tq.codec.grouped_rotation import GroupedRotation
from mlx_tq.codec.normalization import KeyNormalization, cast_clamped, normalize_queries
from mlx_tq.codec.rotation import Rotation, WalshHadamard, rotate_exactly
from mlx_tq.kernels import arguments, backend
from mlx_tq.kernels.gpu import Constants, Kernel, UnsupportedByKernelError, fit_simdgroups, simdgroup_grid

WHT = Kernel("wht", inputs=("vectors", "rotation_flips"), outputs=("rotated",), normalized=("key_scale",))
SIMDGROUPS = 4


def _launch(
    x: mx.array, rotation: Rotation, *, inverse: bool = False, normalization: KeyNormalization | None = None
) -> mx.array:
    if isinstance(rotation, GroupedRotation) and arguments.can_rotate(rotation.parts[0]):
        return _rotate(x, rotation, inverse=inverse, normalization=normalization)  # in mlx operations
    if not isinstance(rotation, WalshHadamard) or not arguments.can_rotate(rotation):
        raise UnsupportedByKernelError(
            f"kernels cannot rotate by {type(rotation).__name__}({rotation.dim}); they support the Walsh-Hadamard "
            f"rotation up to head size {arguments.MAX_DIM}. Other rotations need the reference backend."
        )
    vectors = x.reshape(-1, *x.shape[-3:]) if x.ndim > 4 else x.reshape((1,) * (4 - x.ndim) + x.shape)
    scale = [] if normalization is None else [mx.contiguous(normalization.scale)]
    constants: Constants = (
        ("T", x.dtype),
        ("DIM", rotation.dim),
        ("ORDER", rotation.order),
        ("INVERSE", inverse),
        *arguments.normalization_constants(normalization, x.dtype),
    )
    (rotated,) = fit_simdgroups(
        SIMDGROUPS,
        lambda simdgroups: WHT.run(
            inputs=[vectors, arguments.sign_flips(rotation), *scale],
            constants=(*constants, ("SIMDGROUPS", simdgroups)),
            **simdgroup_grid(x.size // rotation.dim, simdgroups),
            output_shapes=[x.shape],
            output_dtypes=[x.dtype],
        ),
    )
    return rotated


@backend.dispatch(_launch)
def wht(
    x: mx.array, rotation: Rotation, *, inverse: bool = False, normalization: KeyNormalization | None = None
) -> mx.array:
    """Return R x, or R^T x if `inverse`, in the dtype of x [..., D]; with `normalization`, of queries [B, Hq, L, D]."""
    return _rotate(x, rotation, inverse=inverse, normalization=normalization)


def _rotate(x: mx.array, rotation: Rotation, *, inverse: bool, normalization: KeyNormalization | None) -> mx.array:
    vectors = normalize_queries(x, normalization).astype(mx.float32)
    rotated = rotation.inverse(vectors) if inverse else rotate_exactly(vectors, rotation)
    return cast_clamped(rotated, x.dtype, normalization)
