"""`StateHistory`: the recurrent states at the beginnings of a conversation's last turns, which `undo` goes back to."""

from typing import Any

import mlx.core as mx

from mlx_tq.cache.recurrent_states import StoredStates, states_of

_TURNS = 2  # each takes the bytes of the model's states


class StateHistory:
    """Keeps the states of one list of caches at a time; another list begins a new history."""

    def __init__(self, state_format: str) -> None:
        self._format = state_format
        self._caches: list[Any] = []
        self._states: dict[int, list[StoredStates]] = {}  # by the tokens that they have seen, ascending

    def keep(self, caches: list[Any], length: int) -> None:
        """Keep the states, if there are any, of caches that hold `length` tokens."""
        states = [StoredStates(part, self._format) for part in states_of(caches)]
        if not states:
            return
        if caches is not self._caches:
            self._caches, self._states = caches, {}
        mx.eval([entry.state for entry in states])  # else they keep what they are encoded from
        self._states[length] = states
        for oldest in [*self._states][:-_TURNS]:
            del self._states[oldest]

    def holds(self, caches: list[Any], length: int) -> bool:
        return caches is self._caches and length in self._states

    def restore(self, length: int) -> None:
        """Give the caches their states after `length` tokens again, and forget the later ones."""
        for part, states in zip(states_of(self._caches), self._states[length], strict=True):
            part.cache = states.unpack().cache
        mx.eval([part.state for part in states_of(self._caches)])  # other threads may read them
        self._states = {tokens: states for tokens, states in self._states.items() if tokens <= length}
