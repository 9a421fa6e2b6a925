"""`KeptThoughts`: the reasoning before tool calls, for clients that do not send it back with the call.

Templates show it until the next question, so that without it no later prompt would extend what was generated.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping
from threading import Lock
from typing import Any

_MAX_THOUGHTS, _MAX_CHARACTERS = 4096, 2**26

Key = tuple[str, str, str]


class KeptThoughts:
    """Reasoning by the first call that followed it; the least recently used leaves first. Any thread may call."""

    def __init__(self) -> None:
        self._texts: OrderedDict[Key, str] = OrderedDict()
        self._characters = 0
        self._lock = Lock()

    def keep(self, call_id: str, name: str, arguments: Mapping[str, Any], text: str) -> None:
        key = _key(call_id, name, arguments)
        with self._lock:
            self._characters += len(text) - len(self._texts.pop(key, ""))
            self._texts[key] = text
            while len(self._texts) > _MAX_THOUGHTS or self._characters > _MAX_CHARACTERS:
                self._characters -= len(self._texts.popitem(last=False)[1])

    def find(self, call_id: str, name: str, arguments: Mapping[str, Any]) -> str | None:
        key = _key(call_id, name, arguments)
        with self._lock:
            if key in self._texts:
                self._texts.move_to_end(key)
            return self._texts.get(key)


def _key(call_id: str, name: str, arguments: Mapping[str, Any]) -> Key:
    """Return a key with name and arguments, because some models number the calls of each answer from 0."""
    return call_id, name, json.dumps(arguments, sort_keys=True)
