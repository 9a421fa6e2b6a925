"""Covering arrays: few cases that contain all combinations of values of any two, or three, parameters."""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]


def covering(parameters: Mapping[str, Sequence[Any]], ways: int = 2) -> list[Case]:
    """Return cases with every combination of values of any `ways` parameters."""
    cases = _covering(tuple((name, tuple(values)) for name, values in parameters.items()), ways)
    return [dict(case) for case in cases]


@cache
def _covering(parameters: tuple[tuple[str, tuple]], ways: int) -> list[Case]:
    rng, values = random.Random(0), dict(parameters)

    def combine(names: Iterable[str]) -> Iterator[tuple]:
        return product(*([(name, value) for value in values[name]] for name in names))

    def chosen(case: Case, groups: Iterable[tuple[str, ...]]) -> Iterator[tuple]:
        return (tuple((name, case[name]) for name in group) for group in groups)

    missing = dict.fromkeys(group for names in combinations(values, ways) for group in combine(names))
    cases = []
    while missing:
        case = dict(next(iter(missing)))
        rest = [name for name in values if name not in case]
        for name in rng.sample(rest, len(rest)):
            order = rng.sample(values[name], len(values[name]))
            groups = [g for g in combinations([n for n in values if n in case or n == name], ways) if name in g]
            case[name] = max(order, key=lambda x: sum(g in missing for g in chosen({**case, name: x}, groups)))
        for group in chosen(case, combinations(values, ways)):
            missing.pop(group, None)
        cases.append({name: case[name] for name in values})
    return cases


def case_id(case: Mapping[str, Any]) -> str:
    """Return the values of a case as the name of a test."""
    return "-".join("x".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in case.values())
