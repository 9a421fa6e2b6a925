"""Statistics of a model's queries in a file, so that a conversation need not gather them first.

One safetensors file names the model by the fingerprint of its weights and holds, for each layer, the statistics and
what its RoPE does to fixed vectors; a file of another model, or of the same weights under another RoPE, is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_tq.atomic_files import atomic_write, check_kind
from mlx_tq.errors import CacheFormatError
from mlx_tq.policies.queries import QueryStats
from mlx_tq.policies.rope import Rope

VERSION = "1"
_FORMAT = "mlx_tq query statistics"
_SAME = 1e-2  # of turned vectors of unit variance: fp32 angles differ less between machines


@dataclass(frozen=True)
class Calibration:
    """What a file holds.

    Attributes:
        path: of the file.
        layers: statistics of each layer.
        ropes: fp32 [3, D] of each, see `Rope.fingerprint`.
    """

    path: str
    layers: list[QueryStats]
    ropes: list[mx.array]

    def check(self, ropes: Sequence[Rope], *, covariance: bool = False) -> list[QueryStats]:
        """The statistics, for layers with these RoPEs.

        Raises:
            CacheFormatError: other layers, another RoPE, or no covariance though it is needed.
        """
        if misfit := self._misfit(ropes):
            raise CacheFormatError(f"{self.path} {misfit}. {_REMEDY}")
        if covariance and any(stats.moment is None for stats in self.layers):
            raise CacheFormatError(
                f"{self.path} has no covariance, which expected_attention needs. Make it again with mlx_tq.calibrate "
                "--covariance, let the run calibrate itself, or take another policy."
            )
        return self.layers

    def part(self, rank: int, size: int) -> "Calibration":
        """The statistics of one rank's query heads, the `rank`-th of `size` equal shares."""
        return replace(self, layers=[stats.part(rank, size) for stats in self.layers])

    def fits(self, ropes: Sequence[Rope]) -> bool:
        """It was made under these RoPEs."""
        return not self._misfit(ropes)

    def _misfit(self, ropes: Sequence[Rope]) -> str:
        """What differs from a model whose layers have these RoPEs, or ""."""
        if len(ropes) != len(self.layers):
            return f"has {len(self.layers)} layers, the model {len(ropes)}"
        for number, (rope, stats, wanted) in enumerate(zip(ropes, self.layers, self.ropes, strict=True)):
            dim = stats.centre.shape[-1]
            own = rope.fingerprint(dim) if dim == 2 * rope.pairs.shape[1] + rope.free.size else None
            if own is None or float(mx.abs(own - wanted).max()) > _SAME:
                return f"was made under another RoPE than layer {number} has"
        return ""


_REMEDY = "Make it again with mlx_tq.calibrate and this model."


def save_calibration(path: str | Path, model: str, ropes: Sequence[Rope], layers: Sequence[QueryStats]) -> None:
    """Write the statistics of each layer of the model with fingerprint `model` to exactly `path`.

    Raises:
        CacheFormatError: the file cannot be written, or is there and holds no statistics.
    """
    check_replaceable(path)
    arrays = {}
    for number, (rope, stats) in enumerate(zip(ropes, layers, strict=True)):
        arrays[f"{number}.rope"] = rope.fingerprint(stats.centre.shape[-1])
        for name, array in zip(("centre", "amplitude", "moment"), stats.arrays(), strict=False):
            arrays[f"{number}.{name}"] = array
    header = {"format": _FORMAT, "version": VERSION, "model": model, "layers": str(len(layers))}
    try:
        with atomic_write(path, ".safetensors") as temporary:
            mx.save_safetensors(str(temporary), arrays, header)
    except (OSError, RuntimeError) as error:
        raise CacheFormatError(f"cannot write the statistics {path}: {error}. Choose another path.") from error


def check_replaceable(path: str | Path) -> None:
    """Raise CacheFormatError where statistics would take the place of something else."""
    check_kind(path, "file of statistics", lambda header: header.get("format") == _FORMAT)


def load_calibration(path: str | Path, model: str) -> Calibration:
    """Read the statistics of the model with fingerprint `model`.

    Raises:
        CacheFormatError: no such file, a damaged or foreign one, another version or model.
    """
    arrays: Any
    header: Any
    if not Path(path).is_file():
        raise CacheFormatError(f"there is no file of statistics {path}. Make one with mlx_tq.calibrate.")
    try:
        arrays, header = mx.load(str(path), format="safetensors", return_metadata=True)
    except (RuntimeError, ValueError) as error:
        raise CacheFormatError(f"{path} is damaged or holds no statistics ({error}). {_REMEDY}") from error
    if header.get("format") != _FORMAT or header.get("version") != VERSION:
        raise CacheFormatError(f"{path} holds no query statistics of version {VERSION}. {_REMEDY}")
    if header.get("model") != model:
        raise CacheFormatError(f"{path} was made with another model: its weights are not this model's. {_REMEDY}")
    try:
        numbers = range(int(header["layers"]))
        layers = [
            QueryStats(arrays[f"{n}.centre"], arrays[f"{n}.amplitude"], arrays.get(f"{n}.moment")) for n in numbers
        ]
        return Calibration(str(path), layers, [arrays[f"{n}.rope"] for n in numbers])
    except (KeyError, ValueError) as error:
        raise CacheFormatError(f"{path} is damaged ({error!r}). {_REMEDY}") from error
