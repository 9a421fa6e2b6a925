"""How much the engine takes, and who else takes of the same memory."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class EngineLimits:
    """How much the engine takes.

    Attributes:
        concurrency: answers that are generated at once.
        prompt_concurrency: prompts that are read at once.
        queue: jobs that may wait.
        prefill_step_size: tokens of a prompt that are read at a time.
        prompt_cache_size: prompts whose caches are kept for later requests.
        prompt_cache_bytes: of those caches.
        memory: bytes of caches in all, kept ones included; None where caches are not compressed.
        stalled_s: seconds of one step, after which the server reports itself unhealthy.
    """

    concurrency: int
    prompt_concurrency: int
    queue: int
    prefill_step_size: int
    prompt_cache_size: int
    prompt_cache_bytes: int
    memory: int | None
    stalled_s: float = 120.0


class Kept(Protocol):
    """Caches that are kept outside of the engine, and given up where running ones need the room; see `Sessions`."""

    @property
    def nbytes(self) -> int:
        """Bytes of all kept caches."""
        ...

    def trim_to(self, nbytes: int) -> None:
        """Give up some, until the rest take so many bytes at most."""
        ...
