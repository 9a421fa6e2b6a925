"""Build the needle test: can the model still find a fact that lies wholly in the packed region?"""

from collections.abc import Iterable, Sequence
from itertools import groupby, product
from typing import Any

from mlx_tq.cli.haystack import build_case, judge_answer
from mlx_tq.errors import ConfigError
from mlx_tq.evaluate.arms import OFF, Arm
from mlx_tq.evaluate.asking import PASS, VOID, Sample
from mlx_tq.evaluate.results import Record

DEPTHS = {"start": 0.0, "middle": 0.5, "end": 1.0}


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
        samples.append(
            Sample(
                key=f"{tokens} {depth:g} {seed}",
                ids=case.ids,
                expected=case.answer,
                judge=needle_judge(case.answer),
                fields={"tokens": tokens, "depth": depth, "seed": seed},
                question=case.question,
                needle=case.needle,
            )
        )
    return samples


def needle_judge(expected: str) -> Any:
    def judge(answer: str) -> tuple[str, float]:
        verdict = judge_answer(answer, expected).value
        return verdict, float(verdict == PASS)

    return judge


def tabulate_needles(records: Sequence[Record]) -> list[Record]:
    """Return needles found of those that are not void, with a row for each arm and a key for each length and depth."""
    rows: dict[str, Record] = {}
    for record in records:
        place = f"{record['tokens']} at {record['depth']:g}"
        rows.setdefault(record["name"], {"cache": record["name"]}).setdefault(place, []).append(record["verdict"])
    return [
        {key: passes(value) if isinstance(value, list) else value for key, value in row.items()}
        for row in rows.values()
    ]


def passes(verdicts: Sequence[str]) -> str:
    return f"{verdicts.count(PASS)}/{len(verdicts) - verdicts.count(VOID)}"


def note_on_needles(records: Sequence[Record]) -> str:
    """Tell how many needles were packed, and how answers failed."""
    packed = [record for record in records if record["packed"]]
    whole = sum(record["packed"] == record["needle"][1] - record["needle"][0] for record in packed)
    verdicts = sorted(record["verdict"] for record in records)
    note = f"needle entirely in the packed region: {whole} of {len(packed)} answers from compressed caches"
    note += f"; void: {verdicts.count(VOID)}"
    others = [name for name in verdicts if name not in (PASS, VOID)]
    return note + "".join(f"; {name}: {len(list(group))}" for name, group in groupby(others))


def has_missed_needles(records: Sequence[Record]) -> bool:
    """Return True if a compressed cache missed a needle that the fp16 cache finds."""
    return any(record["verdict"] not in (PASS, VOID) for record in records if record["name"] != OFF.name)
