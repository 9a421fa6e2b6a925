"""`KeptThoughts`: the reasoning before tool calls, for clients that do not send it back with the call.

Templates show it until the next question, so that without it no later prompt would extend what was generated.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from threading import Lock
from typing import Any

_MAX_THOUGHTS, _MAX_CHARACTERS = 4096, 2**26


class KeptThoughts:
    """Reasoning by conversation and first call; the least recently used leaves first. Any thread may call."""

    def __init__(self) -> None:
        self._texts: OrderedDict[str, str] = OrderedDict()
        self._characters = 0
        self._lock = Lock()

    def keep(self, key: str, text: str) -> None:
        with self._lock:
            self._characters += len(text) - len(self._texts.pop(key, ""))
            self._texts[key] = text
            while len(self._texts) > _MAX_THOUGHTS or self._characters > _MAX_CHARACTERS:
                self._characters -= len(self._texts.popitem(last=False)[1])

    def find(self, key: str) -> str | None:
        with self._lock:
            if key in self._texts:
                self._texts.move_to_end(key)
            return self._texts.get(key)


def thoughts_key(digest: str, call_id: str, name: str, arguments: Mapping[str, Any]) -> str:
    """Return the key of the reasoning before a call, in a conversation with this digest.

    The id alone is not enough, because some models number the calls of each answer from 0: another client's reasoning
    would be found.
    """
    return _hash(digest, call_id, name, arguments)


def add_to_digest(digest: str, message: Mapping[str, Any]) -> str:
    """Return the digest of a conversation with one more message; answers and results of tools do not change it."""
    is_asked = message["role"] not in ("assistant", "tool")
    return _hash(digest, message["role"], message["content"]) if is_asked else digest


def _hash(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode(errors="surrogatepass")).hexdigest()
