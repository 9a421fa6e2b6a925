"""Calibration: statistics of a layer's queries before RoPE, gathered while a model runs, or read from a file.

Source: TriAttention (Mao et al., arXiv 2604.04921): queries concentrate around a center, which predicts what later
queries will attend to.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_tq.distributed.group import Ranks
from mlx_tq.errors import CacheFormatError
from mlx_tq.files import atomic_write, check_kind
from mlx_tq.policies.rope import Rope, learn_rope

SKIP = 4  # attention sinks, whose queries are unlike all others
_VERSION = "2"
_FORMAT = "mlx_tq query statistics"
_REMEDY = "Make it again with mlx_tq.calibrate and this model."
_ROPE_TOLERANCE = 1e-2  # of rotated vectors of unit variance: fp32 angles differ less between machines


@dataclass(frozen=True)
class QueryStats:
    """Statistics of the queries of one layer, after bias and q_norm and before RoPE."""

    center: mx.array  # mean query, fp32 [Hq, D]
    amplitude: mx.array  # mean norm of each RoPE pair, fp32 [Hq, F]
    moment: mx.array | None = None  # mean outer product, fp32 [Hq, D, D], if the policy needs the covariance

    def arrays(self) -> list[mx.array]:
        return [x for x in (self.center, self.amplitude, self.moment) if x is not None]

    def shard(self, rank: int, size: int) -> "QueryStats":
        """Return the `rank`-th of `size` equal parts of the heads, evaluated, so that any thread can use it."""
        parts = [array.reshape(size, -1, *array.shape[1:])[rank] for array in self.arrays()]
        mx.eval(parts)
        return QueryStats(*parts)

    def gather(self, ranks: Ranks) -> "QueryStats":
        """Return the statistics of all ranks' heads."""
        if ranks.is_alone:
            return self
        return QueryStats(*(mx.array(ranks.gather(np.array(array))) for array in self.arrays()))

    def blend(self, other: "QueryStats", weight: float) -> "QueryStats":
        """Return the mean of both, in which `other` has this weight, from 0 to 1."""
        return QueryStats(*(a + weight * (b - a) for a, b in zip(self.arrays(), other.arrays(), strict=True)))


def _have_shapes(arrays: list[mx.array], count: int, dim: int, pairs: int) -> bool:
    """Return whether these are the first `count` arrays of `QueryStats` for heads of `dim` dims and RoPE pairs."""
    heads = arrays[0].shape[0]
    shapes = [(heads, dim), (heads, pairs), (heads, dim, dim)][:count]
    return [array.shape for array in arrays] == shapes


class Calibrator:
    """Gathers the statistics of one layer's queries from its first `warmup` tokens behind the attention sinks.

    Sums are lazy arrays, so that no pass is synchronized. `rope` is None in a cache from a file until the model runs.
    """

    def __init__(
        self, warmup: int, *, covariance: bool = False, rope: Rope | None = None, stats: QueryStats | None = None
    ) -> None:
        self.warmup, self.covariance, self.rope, self.stats = warmup, covariance, rope, stats
        self._sums: list[mx.array] = []  # over the tokens of the window that is open
        self._count = 0
        self._next = SKIP  # the next position to count

    @property
    def is_gathering(self) -> bool:
        """Whether this needs the queries of a later pass."""
        return self.rope is None or self._is_open

    @property
    def ready(self) -> bool:
        """Whether tokens can be scored with the statistics of a full window."""
        return self.rope is not None and self.stats is not None

    @property
    def can_score(self) -> bool:
        """Whether tokens can be scored, if need be with the statistics of less than a window."""
        return self.rope is not None and self.current_stats is not None

    @property
    def current_stats(self) -> QueryStats | None:
        """The statistics of the last full window; before the first is full, of its tokens so far, if any."""
        return self.open_window[1] if self.stats is None and self._count else self.stats

    @property
    def open_window(self) -> tuple[int, QueryStats]:
        """The number of tokens in the open window, which must not be empty, and their statistics."""
        return self._count, QueryStats(*(total / self._count for total in self._sums))

    @property
    def _is_open(self) -> bool:
        return self.stats is None

    def restart_at(self, position: int) -> None:
        """Empty the open window, and count only queries from this position on."""
        self._sums, self._count, self._next = [], 0, position

    def due(self, stop: int) -> bool:
        """Return whether this needs the queries of a pass that ends before position `stop`."""
        return self.rope is None or (self._is_open and self._next < stop)

    def observe(self, queries: mx.array, start: int, module: Any) -> list[mx.array]:
        """Count queries before RoPE [1, Hq, L, D], from position `start`; return arrays to evaluate with the pass."""
        if self.rope is None:
            self.rope = learn_rope(module, queries.shape[-1])
        stop = start + queries.shape[2]
        while self._is_open and self._next < stop:
            first = max(self._next, start)  # after a trim, or in a shared cache, positions come twice
            last = min(stop, first + self.warmup - self._count)
            counted = queries[0, :, first - start : last - start].astype(mx.float32)
            terms = [counted.sum(axis=1), self.rope.pair_norms(counted).sum(axis=1)]
            if self.covariance:
                terms.append(counted.swapaxes(-1, -2) @ counted)
            self._sums = [a + b for a, b in zip(self._sums, terms, strict=True)] if self._sums else terms
            self._count += last - first
            self._next = last
            if self._count == self.warmup:
                self._finish_window()
        return [*self._sums, *(self.stats.arrays() if self.stats else [])]

    def _finish_window(self) -> None:
        _, self.stats = self.open_window
        self._sums, self._count = [], 0

    def copy(self) -> "Calibrator":
        return copy.copy(self)  # what it holds is replaced, never changed

    @property
    def state(self) -> dict[str, Any]:
        stats = self.stats.arrays() if self.stats else []
        return {"stats": stats, "sums": self._sums, "count": self._count, "next": self._next}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `state`, which lacks empty lists if it comes from a file."""
        self.stats = QueryStats(*state["stats"]) if state.get("stats") else None
        self._sums, self._count, self._next = list(state.get("sums", [])), state["count"], state["next"]
        numbers = (self._count, self._next)
        is_open = all(type(number) is int and number >= 0 for number in numbers) and self._count < max(self.warmup, 1)
        if not is_open or bool(self._sums) != (self._count > 0):
            raise CacheFormatError("a calibration contradicts itself")

    def set_rope(self, rope: Rope | None) -> None:
        """Set the RoPE, which files do not store; raise CacheFormatError if it is not that of the statistics."""
        for arrays in (self._sums, self.stats.arrays() if self.stats else []):
            count = 3 if self.covariance else 2
            if rope is not None and arrays and not _have_shapes(arrays, count, rope.dim, rope.gain.size):
                raise CacheFormatError("the statistics of a calibration are of another model")
        self.rope = rope


@dataclass(frozen=True)
class Calibration:
    """The content of a calibration file, which names its model by the fingerprint of the weights."""

    path: str
    layers: list[QueryStats]
    ropes: list[mx.array]  # `Rope.fingerprint` of each layer, as the same weights may run under another RoPE

    def check(self, ropes: Sequence[Rope], *, covariance: bool = False) -> list[QueryStats]:
        """Return the statistics for layers with these RoPEs, or raise CacheFormatError if they do not fit."""
        if mismatch := self._mismatch(ropes):
            raise CacheFormatError(f"{self.path} {mismatch}. {_REMEDY}")
        if covariance and any(stats.moment is None for stats in self.layers):
            raise CacheFormatError(
                f"{self.path} has no covariance, which expected_attention needs. Make it again with mlx_tq.calibrate "
                "--covariance, let the run calibrate itself, or use another policy."
            )
        return self.layers

    def shard(self, rank: int, size: int) -> "Calibration":
        """Return the calibration of one rank's query heads, the `rank`-th of `size` equal parts."""
        return replace(self, layers=[stats.shard(rank, size) for stats in self.layers])

    def fits(self, ropes: Sequence[Rope]) -> bool:
        return not self._mismatch(ropes)

    def _mismatch(self, ropes: Sequence[Rope]) -> str:
        if len(ropes) != len(self.layers):
            return f"has {len(self.layers)} layers, the model {len(ropes)}"
        for number, (rope, stats, expected) in enumerate(zip(ropes, self.layers, self.ropes, strict=True)):
            fingerprint = rope.fingerprint()
            sizes = (stats.center.shape[1], stats.amplitude.shape[1], expected.shape)
            if (
                sizes != (rope.dim, rope.gain.size, fingerprint.shape)
                or float(mx.abs(fingerprint - expected).max()) > _ROPE_TOLERANCE
            ):
                return f"was made under another RoPE than layer {number} has"
        return ""


def save_calibration(path: str | Path, model: str, ropes: Sequence[Rope], layers: Sequence[QueryStats]) -> None:
    """Write the statistics of each layer to exactly `path`.

    `model` is the fingerprint of the model, or several separated by spaces, as of one model in several dtypes.
    """
    check_replaceable(path)
    arrays = {}
    for number, (rope, stats) in enumerate(zip(ropes, layers, strict=True)):
        arrays[f"{number}.rope"] = rope.fingerprint()
        for name, array in zip(("center", "amplitude", "moment"), stats.arrays(), strict=False):
            arrays[f"{number}.{name}"] = array
    header = {"format": _FORMAT, "version": _VERSION, "model": model, "layers": str(len(layers))}
    try:
        with atomic_write(path, ".safetensors") as temporary:
            mx.save_safetensors(str(temporary), arrays, header)
    except (OSError, RuntimeError) as error:
        raise CacheFormatError(f"cannot write the calibration file {path}: {error}. Choose another path.") from error


def check_replaceable(path: str | Path) -> None:
    """Raise CacheFormatError if a calibration file would replace a file of another kind."""
    check_kind(path, "calibration file", lambda header: header.get("format") == _FORMAT)


def calibrated_models(path: str | Path) -> list[str]:
    """Return the fingerprints of the models that a calibration file is for."""
    loaded: Any = mx.load(str(path), format="safetensors", return_metadata=True)
    return str(loaded[1]["model"]).split()


def load_calibration(path: str | Path, model: str) -> Calibration:
    """Read the calibration of the model with fingerprint `model`, or raise CacheFormatError."""
    arrays: Any
    header: Any
    if not Path(path).is_file():
        raise CacheFormatError(f"there is no calibration file {path}. Make one with mlx_tq.calibrate.")
    try:
        arrays, header = mx.load(str(path), format="safetensors", return_metadata=True)
    except (RuntimeError, ValueError) as error:
        raise CacheFormatError(f"{path} is damaged or not a calibration file ({error}). {_REMEDY}") from error
    if header.get("format") != _FORMAT or header.get("version") != _VERSION:
        raise CacheFormatError(f"{path} is not a calibration file of version {_VERSION}. {_REMEDY}")
    if model not in header.get("model", "").split():
        raise CacheFormatError(f"{path} was made with another model: its weights are not this model's. {_REMEDY}")
    try:
        numbers = range(int(header["layers"]))
        layers = [
            QueryStats(arrays[f"{n}.center"], arrays[f"{n}.amplitude"], arrays.get(f"{n}.moment")) for n in numbers
        ]
        calibration = Calibration(str(path), layers, [arrays[f"{n}.rope"] for n in numbers])
        for stats in layers:
            arrays_of_layer = stats.arrays()
            dim, pairs = stats.center.shape[1], stats.amplitude.shape[1]
            if not _have_shapes(arrays_of_layer, len(arrays_of_layer), dim, pairs):
                raise ValueError("arrays of other shapes")
        return calibration
    except Exception as error:
        raise CacheFormatError(f"{path} is damaged ({error!r}). {_REMEDY}") from error
