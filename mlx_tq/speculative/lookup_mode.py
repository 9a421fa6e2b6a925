"""`LookupMode`: whether conversations with a model use prompt lookup, and what their drafts have cost so far."""

from collections.abc import Sequence
from typing import Any

from mlx_tq.errors import ConfigError, unknown_name
from mlx_tq.integration.rollback import draft_blocker
from mlx_tq.kernels import backend
from mlx_tq.speculative.draft_gate import MAX_ROWS, DraftGate
from mlx_tq.speculative.prompt_lookup import PromptLookup

MODES = AUTO, ON, OFF = "auto", "on", "off"


class LookupMode:
    """Prompt lookup for the conversations with one model.

    "auto" drafts when that is expected to be faster, "on" whenever text repeats, and "off" never.
    """

    def __init__(self, name: str) -> None:
        if name not in MODES:
            raise unknown_name("prompt_lookup", name, MODES)
        self.name = name
        self._gate = DraftGate(first_compiles=backend.is_gpu()) if name == AUTO else None

    @property
    def compiled_lengths(self) -> range:
        """The lengths of passes whose kernels are compiled before the first answer.

        "auto" compiles those of verify passes with its first drafts, so that answers without drafts start no later.
        """
        return range(1, MAX_ROWS + 1 if self.name == ON else 2)

    def blocker(self, model: Any, caches: list[Any]) -> str | None:
        """Return why nothing is drafted although the mode is not "off", or None."""
        return None if self.name == OFF else draft_blocker(model, caches)

    def check(self, model: Any, caches: list[Any]) -> None:
        """Raise ConfigError if the mode is "on" and drafts are not possible."""
        self._drafts(model, caches)

    def begin(self, model: Any, caches: list[Any], ids: Sequence[int]) -> PromptLookup | None:
        """Return the lookup for an answer to a conversation of tokens `ids`, or None if nothing is drafted."""
        return PromptLookup(ids, self._gate) if self._drafts(model, caches) else None

    def _drafts(self, model: Any, caches: list[Any]) -> bool:
        """Return whether to draft; raise ConfigError if the mode is "on" and that is not possible."""
        reason = self.blocker(model, caches)
        if self.name == ON and reason is not None:
            raise ConfigError(f"prompt lookup is on, but {reason}. Choose auto, which drafts where it can, or off.")
        return self.name != OFF and reason is None


NO_LOOKUP = LookupMode(OFF)
