"""`PrefillGrid`: the positions at which prefill steps end, so that each takes about as long: `STEP_SECONDS`.

They depend on the position alone, so an answer depends neither on other requests nor on where a prompt continues from.
Attention to a long context makes a step slower, so that steps get shorter with the position.
"""

import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlx_tq.config import BLOCK, KVConfig
from mlx_tq.files import atomic_write, cache_folder
from mlx_tq.integration.probe import position_limit
from mlx_tq.kernels import thresholds
from mlx_tq.models import fingerprint, ranks_of
from mlx_tq.prompt_cache.compressed import compressed
from mlx_tq.prompt_cache.memory import MAX_PREFILL_STEP

STEP_SECONDS = 0.2
_TIMED_STEP, _TIMED_SECONDS, _MAX_TIMED = 256, 3.0, 16
_OUTDATED = 1.5  # remeasure if this many times the stored step size now fits into STEP_SECONDS


@dataclass(frozen=True)
class PrefillGrid:
    """Steps of `first` tokens at the beginning, and of first / (1 + growth x position) later."""

    first: int
    growth: float = 0.0  # of the seconds that a token takes, with each position, as a share of those at the beginning

    def step(self, position: int) -> int:
        """Return the tokens of a step that begins at a position of the grid."""
        if not self.growth:
            return self.first
        return max(BLOCK, int(self.first / (1 + self.growth * position)) // BLOCK * BLOCK)

    def ends(self, segments: Sequence[Sequence[int]], start: int) -> list[int]:
        """Return where the steps of a prompt end whose segments begin at `start`; each segment's end is one.

        The last token of all is not prefilled, but begins the answer.
        """
        borders = segment_ends(segments, start)
        ends, position = set(borders), 0
        while borders and position < borders[-1]:
            if position > start:
                ends.add(position)
            position += self.step(position)
        return sorted(ends)


def segment_ends(segments: Iterable[Sequence[int]], start: int) -> list[int]:
    """Return where segments end that begin at `start`; the last one ends a token early."""
    *ends, last = accumulate(map(len, segments), initial=start)
    return [end for end in (*ends[1:], last - 1) if end > start]


def measured_grid(model: Any, config: KVConfig) -> PrefillGrid:
    """Return the grid of a model on this machine, which is measured once and kept in the cache folder.

    Measure again if a step is now at least 1.5 times as fast: the machine was busy at the first measurement.
    """
    path, key, ranks = cache_folder() / "prefill-steps.json", _key(model, config), ranks_of(model)
    measured = _read(path)
    earlier = ranks.broadcast(lambda: measured.get(key))
    stored_grid = None if earlier is None else PrefillGrid(*earlier)
    with compressed(model, replace(config, evict=None)):  # no eviction round may run during a timed step
        if stored_grid is not None and not _is_outdated(stored_grid, model):
            return stored_grid
        grid = _measure(model)
    with suppress(OSError):  # a read-only folder: it is measured each time
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary:
            temporary.write_text(json.dumps({**measured, key: astuple(grid)}, indent=1) + "\n", encoding="utf-8")
    return grid


def _key(model: Any, config: KVConfig) -> str:
    parts = [fingerprint(model), config.to_dict(), thresholds.machine(), thresholds.fingerprint()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _read(path: Path) -> dict[str, list[Any]]:
    """Return the grids that were measured; anything else in the file is left out."""
    with suppress(OSError, ValueError):
        content = json.loads(path.read_text(encoding="utf-8"))
        return {key: grid for key, grid in content.items() if _is_grid(grid)} if isinstance(content, dict) else {}
    return {}


def _is_grid(grid: Any) -> bool:
    match grid:
        case [int(first), float(growth)]:
            return BLOCK <= first <= MAX_PREFILL_STEP and 0 <= growth < 1
    return False


def _is_outdated(grid: PrefillGrid, model: Any) -> bool:
    step = min(grid.first, _timed_step(model))
    seconds = min(_time_steps(model, step, 1)[0] for _ in range(2))  # kernels are compiled in the first
    return ranks_of(model).broadcast(lambda: _first_step(seconds, step) >= _OUTDATED * grid.first)


def _measure(model: Any) -> PrefillGrid:
    """Time steps at the beginning of a prompt, and fit seconds that grow linearly with the position.

    All are timed twice, and the shorter time counts: other work only makes steps slower.
    """
    ranks, step = ranks_of(model), _timed_step(model)
    _time_steps(model, step, 1)  # first kernels are compiled
    (seconds,) = _time_steps(model, step, 1)
    most = min(_MAX_TIMED, _positions(model) // step)
    count = ranks.broadcast(lambda: min(most, max(3, int(_TIMED_SECONDS / 2 / seconds))))
    fastest = np.minimum(_time_steps(model, step, count), _time_steps(model, step, count))
    slope, begin = np.polyfit(np.arange(count) * step, fastest, 1)
    begin = max(float(begin), float(fastest.min()) / 2)
    fitted = _first_step(begin, step), max(0.0, float(slope) / begin)
    return PrefillGrid(*ranks.broadcast(lambda: fitted))


def _time_steps(model: Any, step: int, count: int) -> list[float]:
    """Return the seconds of the first steps of a prompt."""
    caches, seconds = make_prompt_cache(model), []
    for _ in range(count):
        started = time.perf_counter()
        model(mx.ones((1, step), mx.int32), cache=caches)
        mx.eval([cache.state for cache in caches])  # as in a prefill, which computes no logits
        seconds.append(time.perf_counter() - started)
    return seconds


def _first_step(seconds: float, step: int) -> int:
    """Return the tokens that take `STEP_SECONDS` if `step` tokens take `seconds`."""
    return min(MAX_PREFILL_STEP, max(BLOCK, int(STEP_SECONDS / seconds * step) // BLOCK * BLOCK))


def _timed_step(model: Any) -> int:
    return max(1, min(_TIMED_STEP, _positions(model) // 3))


def _positions(model: Any) -> int:
    return position_limit(model) or _MAX_TIMED * _TIMED_STEP
