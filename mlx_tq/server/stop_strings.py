"""`StopStrings`: finds the stop string that ends an answer, unless it is in the model's reasoning."""

from collections.abc import Sequence
from typing import Any

from mlx_lm.generate import TextStateMachine

from mlx_tq.server.opening_mark import OpeningMark


class StopStrings:
    """Withhold text that may still become a stop string.

    `thinking` are the reasoning markers, if the model has them; `is_thinking` says that the prompt has already opened
    the reasoning. Otherwise the answer may begin with it.
    """

    def __init__(self, stops: Sequence[str], thinking: tuple[str, str] | None = None, *, is_thinking: bool) -> None:
        self._stops = stops
        start, self._end = thinking if thinking is not None and stops else ("", "")
        self._is_thinking = is_thinking and self._end != ""
        self._opening = OpeningMark(start) if start and not is_thinking else None
        self._tail = ""  # of the reasoning, which may be a part of the mark after it
        # A stop string leads to the state that is its index.
        ends: dict[Any, Any] = {index: [] for index in range(len(stops))}
        self._state = TextStateMachine(
            {"normal": list(zip(stops, range(len(stops)), strict=True)), **ends}
        ).make_state()

    def add(self, text: str, *, is_last: bool) -> tuple[str, str | None]:
        """Add text; return the text that is certain, and the stop string that ended it, if one did."""
        if self._opening is not None:
            opening = self._opening.add(text, is_last=is_last)
            if opening is None:
                return "", None
            self._opening, (self._is_thinking, text) = None, opening
        certain = ""
        if self._is_thinking:
            index = (self._tail + text).find(self._end)
            length = len(text) if index < 0 else index + len(self._end) - len(self._tail)
            certain, text = text[:length], text[length:]
            self._tail, self._is_thinking = (self._tail + certain)[1 - len(self._end) :], index < 0
        self._state, segments = TextStateMachine.split(self._state, text)
        certain += "".join(part for state, part in segments if state == "normal")
        if self._state[0] != "normal":
            return certain, self._stops[self._state[0]]
        if is_last:
            self._state, rest, _ = TextStateMachine.flush(self._state)
            certain += rest
        return certain, None
