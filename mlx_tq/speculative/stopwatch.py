"""`Stopwatch`: times the passes of a model."""

import time


class Stopwatch:
    """Times passes without the time that the consumer of their tokens takes."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._paused_at = 0.0

    def pause(self) -> None:
        self._paused_at = time.perf_counter()

    def resume(self) -> None:
        self._began += time.perf_counter() - self._paused_at

    def lap(self) -> float:
        """Return the seconds since the last lap."""
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        return seconds
