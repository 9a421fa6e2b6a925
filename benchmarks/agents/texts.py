"""Made-up texts for the parts of a recorded trace: each has the recorded number of words of one token each.

Parts whose requests shared a prefix with an earlier one share the words before the place where they diverged.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Trace = dict[str, Any]
TRACES = Path(__file__).parent / "traces"

# What JSON adds to the words of a tool definition and of a call, in tokens.
DEFINITION_TOKENS, CALL_TOKENS = 45, 14
_BILLING_TOKENS = 30  # two system prompts that diverge before this have different billing lines, and else the same text


def read_trace(client: str) -> Trace:
    trace: Trace = json.loads((TRACES / f"{client}.json").read_text(encoding="utf-8"))
    return trace


def one_token_words(tokenizer: Any, count: int = 2000) -> list[str]:
    """Return lowercase words that are one token each after a space, in the order of their tokens."""
    words = (tokenizer.decode([token]) for token in range(len(tokenizer.get_vocab())))
    plain = [word[1:] for word in words if word[:1] == " " and len(word) > 3 and word[1:].isascii()]
    return sorted(word for word in plain if word.isalpha() and word.islower())[:count]


def requests_of(trace: Trace) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield session, number and record of each request in the recorded order."""
    for session in trace["sessions"]:
        for number, record in enumerate(session["requests"]):
            yield session["session"], number, record


class Texts:
    """The words of each part of a trace, by its hash. With a `scale` below 1, all texts are shorter."""

    def __init__(self, trace: Trace, words: list[str], scale: float = 1.0) -> None:
        self._trace, self._words, self._scale = trace, words, scale
        self._texts: dict[str, list[str]] = {}
        self._has_billing = trace["dialect"] == "anthropic"
        self.billing: dict[str, str] = {}  # of Claude Code's system prompts: what their first line has as a hash
        records = {(session, number): record for session, number, record in requests_of(trace)}
        for record in records.values():
            self._add(record, records[tuple(record["from"])] if record["from"] else None)

    def __getitem__(self, part: str) -> str:
        return " ".join(self._texts[part])

    def kind(self, part: str) -> str:
        return str(self._trace["parts"][part][0])

    def _add(self, record: dict[str, Any], source: dict[str, Any] | None) -> None:
        parts = record["parts"]
        others = source["parts"] if source else []
        pairs = zip(parts, others, strict=False)
        place = next((n for n, (part, other) in enumerate(pairs) if part != other), None)
        for index, part in enumerate(parts):
            if part in self._texts:
                continue
            words = self._new_words(part)
            self.billing[part] = part[:3]
            if index == place and self.kind(part) == self.kind(others[index]):
                other = self._texts[others[index]]
                if self._has_billing and index == 0 and record["prefix"] < _BILLING_TOKENS:
                    words = other
                else:
                    shared = self._shared_words(record, index)
                    words[:shared] = other[: min(shared, len(words))]
                    self.billing[part] = self.billing[others[index]]
            self._texts[part] = words

    def _count(self, part: str) -> int:
        kind, tokens = self._trace["parts"][part]
        overhead = {"definition": DEFINITION_TOKENS, "assistant+call": CALL_TOKENS}.get(kind, 0)
        return max(2, round(self._scale * (tokens - overhead)))

    def _new_words(self, part: str) -> list[str]:
        return random.Random(part).choices(self._words, k=self._count(part))

    def _shared_words(self, record: dict[str, Any], index: int) -> int:
        """Return how many words of a part are before the place where a prompt diverges."""
        sizes = [self._trace["parts"][part][1] for part in record["parts"]]
        start = sum(sizes[:index]) * record["tokens"] / sum(sizes)
        return min(max(0, round(self._scale * (record["prefix"] - start))), self._count(record["parts"][index]) - 1)
