"""What differs between golden runs, place by place, and the reason of each difference.

before.json was recorded at commit f34aaad, then.json today under the defaults of that day, today.json today. So what
the code changed (before to then) and what the defaults changed (then to today) are told apart.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from difflib import SequenceMatcher
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
NOTHING = "(nothing)"
# What a sweep calls its variants now, without what the defaults are spelled with, and what it called them before.
_SPELLED = re.compile(r":(?:stats=text|score_unrotated_dims=(?:on|off)|aggregation=paper)")
_CALLED = {
    "v3": "triattention",
    "v3:aggregation=v3": "triattention:aggregation=v3",
    "v1:evict=highest:nope=off": "triattention:mode=v1:evict=highest",
}


class Difference(NamedTuple):
    """Where two results differ, such as `chat / 0 / out / 3`, and what stands there in each, as JSON."""

    place: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.place}\n  - {self.old}\n  + {self.new}"


class Reason(NamedTuple):
    """Why differences of a kind are right.

    Attributes:
        kind: of the difference, in a few words.
        why: it is right.
        place: pattern found in the place.
        old: pattern that all of the old text fits; its groups can be referred to in `new`.
        new: pattern that all of the new text fits.
        less: the last number of the text, where it has digits alone, must have become smaller.
    """

    kind: str
    why: str
    place: str
    old: str = ".*"
    new: str = ".*"
    less: bool = False

    def explains(self, found: Difference) -> bool:
        """Whether this is the reason of a difference."""
        if not re.search(self.place, found.place):
            return False
        if not re.fullmatch(f"(?:{self.old})\n(?:{self.new})", f"{found.old}\n{found.new}"):
            return False
        return not self.less or _last(found.new) < _last(found.old)


def _last(text: str) -> float:
    return float(re.findall(r"\d+(?:\.\d+)?", text)[-1])


def differences(old: Any, new: Any, place: str) -> list[Difference]:
    """Each place at and below `place` at which two results differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(key for key in new if key not in old)]
        pairs = [(f"{place} / {key}", old.get(key, NOTHING), new.get(key, NOTHING)) for key in keys]
    elif isinstance(old, list) and isinstance(new, list):
        pairs = [(f"{place} / {number}", *pair) for number, pair in enumerate(_aligned(old, new))]
    else:
        before, after = (json.dumps(each, ensure_ascii=False) for each in (old, new))
        return [] if before == after else [Difference(place, before, after)]
    return [found for where, before, after in pairs for found in differences(before, after, where)]


def _aligned(old: list[Any], new: list[Any]) -> Iterator[tuple[Any, Any]]:
    """The items of two lists side by side; where one has more, those that are in both stand together.

    Of what was replaced by more or fewer items the last stand side by side.
    """
    if len(old) == len(new):
        yield from zip(old, new, strict=True)
        return
    texts = [[json.dumps(each) for each in items] for items in (old, new)]
    for _, a, b, c, d in SequenceMatcher(None, *texts, autojunk=False).get_opcodes():
        yield from reversed([*zip_longest(old[a:b][::-1], new[c:d][::-1], fillvalue=NOTHING)])


@cache
def recorded(name: str) -> dict[str, Any]:
    """The runs in a file: before, then or today."""
    found: dict[str, Any] = json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))
    for sweep in found["evaluate sweep"]:
        sweep["out"]["results"] = {_called(key): row for key, row in sweep["out"]["results"].items()}
    return found


def _called(name: str) -> str:
    """A result of a sweep by today's name of its variant."""
    variant, space, rest = _SPELLED.sub("", name).partition(" ")
    return f"{_CALLED.get(variant, variant)}{space}{rest}"


def changes(old: str, new: str) -> list[Difference]:
    """All differences between two records."""
    first, second = recorded(old), recorded(new)
    names = [*first, *(name for name in second if name not in first)]
    return [each for name in names for each in differences(first.get(name, NOTHING), second.get(name, NOTHING), name)]


def explained(found: list[Difference], reasons: list[Reason]) -> dict[Reason, list[Difference]]:
    """Differences by the first reason that explains them.

    Raises:
        ValueError: one that none explains, or a reason that explains nothing.
    """
    by_reason: dict[Reason, list[Difference]] = {reason: [] for reason in reasons}
    unknown = []
    for each in found:
        reason = next((reason for reason in reasons if reason.explains(each)), None)
        (unknown if reason is None else by_reason[reason]).append(each)
    idle = [reason.kind for reason, those in by_reason.items() if not those]
    if unknown or idle:
        shown = "\n".join(map(str, unknown))
        raise ValueError(f"{len(unknown)} differences without a reason, reasons without one: {idle}\n{shown}")
    return by_reason


def same(field: str, old: str, new: str) -> tuple[int, int]:
    """Of the values of a field of this name in both records, how many are equal, and how many there are."""
    first, second = (Counter(_values(recorded(name), field, "")) for name in (old, new))
    return (first & second).total(), first.total()


def _values(found: Any, field: str, place: str) -> Iterator[tuple[str, str]]:
    if isinstance(found, dict):
        for key, value in found.items():
            if key == field:
                yield place, json.dumps(value)
            yield from _values(value, field, f"{place} / {key}")
    elif isinstance(found, list):
        for number, value in enumerate(found):
            yield from _values(value, field, f"{place} / {number}")
