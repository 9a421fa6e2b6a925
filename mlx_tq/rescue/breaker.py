"""When to try a service again that failed: sooner after one failure, ever later after many."""

import time
from collections.abc import Callable

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0  # seconds
PATIENCE = 3  # failures in a row after which nobody waits for the service


class Breaker:
    """A circuit breaker. One thread uses it.

    After a failure the next trial waits 0.1 s, then twice as long, up to 30 s. After three failures in a row it is
    open: until the pause is over, `allows` is false and callers do without.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._next = 0.0

    @property
    def pause(self) -> float:
        """Seconds until the next trial."""
        return max(0.0, self._next - self._clock())

    @property
    def allows(self) -> bool:
        """A caller may be made to wait for the service."""
        return self._failures < PATIENCE or self.pause == 0

    def worked(self) -> None:
        """Note that a call went through."""
        self._failures, self._next = 0, 0.0

    def failed(self) -> None:
        """Note that a call did not go through."""
        self._failures += 1
        self._next = self._clock() + min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(self._failures - 1, 30))
