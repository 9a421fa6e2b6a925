"""Build the needle test: can the model still find a fact that lies wholly in the packed region?"""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product
from typing import Any

from mlx_tq.cli.haystack import build_case, judge_answer
from mlx_tq.errors import ConfigError
from mlx_tq.evaluate.arms import OFF, Arm
from mlx_tq.evaluate.asking import PASS, VOID, Sample
from mlx_tq.evaluate.flag_values import DEPTHS
from mlx_tq.evaluate.results import Record


def needle_samples(
    tokenizer: Any,
    text: str,
    arms: Sequence[Arm],
    lengths: Sequence[int],
    depths: Iterable[float] = tuple(DEPTHS.values()),
    seeds: Iterable[int] = range(3),
) -> list[Sample]:
    """Plant a needle at every length, depth and seed; the arms must have the same sinks and window."""
    regions = {(arm.config.sinks, arm.config.window) for arm in arms if not arm.config.is_off}
    if len(regions) > 1:
        raise ConfigError(f"the arms have different sinks and windows: {sorted(regions)}. Give them the same ones.")
    sinks, window = regions.pop() if regions else (OFF.config.sinks, OFF.config.window)
    samples = []
    for tokens, depth, seed in product(lengths, depths, seeds):
        case = build_case(tokenizer, text, tokens=tokens, depth=depth, seed=seed, sinks=sinks, window=window)
        key, fields = f"{tokens} {depth:g} {seed}", {"tokens": tokens, "depth": depth, "seed": seed}
        judge = partial(_judge, case.answer)
        samples.append(Sample(key, case.ids, case.answer, judge, fields, question=case.question, needle=case.needle))
    return samples


def _judge(expected: str, answer: str) -> tuple[str, float]:
    verdict = judge_answer(answer, expected).value
    return verdict, float(verdict == PASS)


def tabulate_needles(records: Sequence[Record]) -> list[Record]:
    """Return needles found of those that are not void, with a row for each arm and a key for each length and depth."""
    verdicts: dict[str, dict[str, list[str]]] = {}
    for record in records:
        place = f"{record['tokens']} at {record['depth']:g}"
        verdicts.setdefault(record["name"], {}).setdefault(place, []).append(record["verdict"])
    return [
        {"cache": name} | {place: count_found(of_place) for place, of_place in places.items()}
        for name, places in verdicts.items()
    ]


def count_found(verdicts: Sequence[str]) -> str:
    return f"{verdicts.count(PASS)}/{len(verdicts) - verdicts.count(VOID)}"


def note_on_needles(records: Sequence[Record]) -> str:
    packed = [record for record in records if record["packed"]]
    whole = sum(record["packed"] == record["needle"][1] - record["needle"][0] for record in packed)
    verdicts = Counter(record["verdict"] for record in records)
    failed = "".join(f"; {name}: {count}" for name, count in sorted(verdicts.items()) if name not in (PASS, VOID))
    note = f"needle entirely in the packed region: {whole} of {len(packed)} answers from compressed caches"
    return f"{note}; void: {verdicts[VOID]}{failed}"
