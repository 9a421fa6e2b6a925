"""Study what eviction costs, setting by setting: a text predicted, needles found, and how much of them survived.

    python -m benchmarks.studies.sweep --policies triattention,random --budgets 75,50 --json FILE

With --once each text is prefilled once for all settings without eviction, and copies evict in one round before the
question, as kvpress measures: it takes a fraction of the time, and settings differ in their choice alone.
"""

import argparse
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import mean
from typing import Any

from benchmarks.studies.flags import open_results, run_study, study_parser
from benchmarks.studies.needle_kinds import KINDS, SPREAD, plant
from mlx_tq.cli.inputs import read_text
from mlx_tq.cli.loading import calibrate_model, load_model
from mlx_tq.cli.options import Request
from mlx_tq.cli.screen import progress_bar
from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.errors import ConfigError
from mlx_tq.evaluate.arms import OFF, Arm
from mlx_tq.evaluate.asking import Prefill, Sample, ask_samples, prefill_caches
from mlx_tq.evaluate.flag_values import parse_depths, whole_numbers
from mlx_tq.evaluate.inspection import reseed_random
from mlx_tq.evaluate.needles import count_found
from mlx_tq.evaluate.results import Columns, Record, Results
from mlx_tq.evaluate.teacher_forced import cut_chunks, divergence, perplexity, score_text
from mlx_tq.policies import CalibratedPolicy, ExpectedAttention, Recency, TriAttention, parse_policy
from mlx_tq.policies.policy import TEXT
from mlx_tq.prompt_cache.build import build_caches
from mlx_tq.prompt_cache.compressed import planner
from mlx_tq.prompt_cache.layer_group import begin_pass, layer_group_of

TOGETHER = 9  # settings that share one pass of the uncompressed cache: few, so that a stopped sweep loses little
POLICIES = (
    "triattention,published:evict=highest,published:score_unrotated_dims=on,"
    "published:evict=highest:score_unrotated_dims=on,published:mode=v2,published:mode=v1,random,recency,"
    "streaming,knorm"
)


@dataclass(frozen=True)
class Setting:
    """A policy with its options, which win over the other fields, and a budget."""

    variant: str
    retention: float  # percentage of the tokens seen that stays
    granularity: int = 1
    trigger: int = 128
    sinks: int = KVConfig.sinks
    once: bool = False

    @property
    def name(self) -> str:
        text = f"{self.variant} {self.retention:g}% blocks {self.granularity} trigger {self.trigger}"
        return f"{text} sinks {self.sinks}{' once' if self.once else ''}"

    def arm(self, base: KVConfig, warmup: int) -> Arm:
        policy = parse_policy(self.variant, granularity=self.granularity, trigger=self.trigger, warmup=warmup)
        evict = EvictConfig(policy, f"{self.retention}%", "off")
        return Arm(self.name, replace(base, sinks=self.sinks, evict=evict))


def grid(
    variants: Sequence[str],
    budgets: Sequence[float],
    granularities: Sequence[int],
    triggers: Sequence[int],
    sinks: Sequence[int],
    *,
    once: bool = False,
) -> list[Setting]:
    """Return all combinations; modes v1 and v2 take 0 sinks."""
    settings = []
    for variant, budget, granularity, trigger, count in product(variants, budgets, granularities, triggers, sinks):
        count = 0 if parse_policy(variant, warmup=1).can_evict_sinks else count
        settings.append(Setting(variant, budget, granularity, trigger, count, once))
    return list(dict.fromkeys(settings))


class _SettingResults:
    """Adds the fields of a setting to its records."""

    def __init__(self, results: Results, settings: Sequence[Setting]) -> None:
        self._results, self.rows = results, results.rows
        self._fields = {setting.name: {"name": setting.name, **vars(setting)} for setting in settings}

    def add(self, key: str, record: Record) -> None:
        self._results.add(key, {**self._fields.get(record["name"], {}), **record})


def sweep_text(
    model: Any,
    chunks: list[list[int]],
    settings: Sequence[Setting],
    base: KVConfig,
    results: Results,
    *,
    warmup: int,
    step: int,
) -> None:
    """Predict the chunks under every setting that has no results."""
    keys = {setting: f"{setting.name} | text {len(chunks)} x {len(chunks[0])}" for setting in settings}
    missing = [setting for setting in settings if keys[setting] not in results.rows]
    total = (len(missing) + -(-len(missing) // TOGETHER)) * sum(len(chunk) - 1 for chunk in chunks)
    with progress_bar("text", total) as advance:
        for start in range(0, len(missing), TOGETHER):
            group = missing[start : start + TOGETHER]
            arms = [setting.arm(base, warmup) for setting in group]
            baseline, *scores = score_text(model, chunks, arms, step, advance)
            for setting, score in zip(group, scores, strict=True):
                record = divergence(setting.name, score) | perplexity(setting.name, score, baseline.nll)
                names = ("tokens", "ppl", "delta", "delta_error", "kld", "kld_error", "top1", "rounds", "kept")
                fields = {"name": setting.name, **vars(setting)}
                results.add(keys[setting], {**fields, **{name: record[name] for name in names}})


def sweep_needles(
    model: Any,
    tokenizer: Any,
    text: str,
    settings: Sequence[Setting],
    base: KVConfig,
    results: Results,
    *,
    kinds: Sequence[str],
    lengths: Sequence[int],
    depths: Sequence[float],
    seeds: Sequence[int],
    sinks: int,
    warmup: int,
    step: int,
    max_tokens: int,
) -> None:
    """Ask every setting about every scene; no needle lies in the first `sinks` tokens."""
    if (sinks + base.window) * 8 > min(lengths):
        raise ConfigError(
            f"sinks {sinks} and window {base.window} are more than an eighth of {min(lengths):,} tokens, and nothing "
            f"in them is ever evicted. Take --lengths from {(sinks + base.window) * 8:,}, or smaller --sinks and "
            "--kv-window."
        )
    arms = [setting.arm(base, warmup) for setting in settings]
    prefill_with = _prefills(model, settings, arms, step)
    for seed, length, kind in product(seeds, lengths, kinds):
        for depth in (0.5,) if kind in SPREAD else depths:
            planted = plant(kind, tokenizer, text, depth, seed, tokens=length, sinks=sinks, window=base.window)
            samples = [
                Sample(
                    key=f"| {kind} {length} {depth:g} {seed} {index}",
                    ids=[*planted.scene.ids, *planted.scene.questions[index]],
                    expected=planted.facts[index].answer,
                    judge=lambda answer, planted=planted, index=index: (planted.verdict(index, answer), 0.0),
                    fields={"kind": kind, "length": length, "depth": depth, "seed": seed, "index": index},
                    shared=len(planted.scene.ids),
                    question=len(planted.scene.ids),
                    needle=planted.scene.needles[index],
                )
                for index in planted.asked
            ]
            options = {"max_tokens": max_tokens, "step": step, "ask_void": True, "prefill_with": prefill_with}
            ask_samples(model, tokenizer, samples, arms, _SettingResults(results, settings), **options)


def _prefills(model: Any, settings: Sequence[Setting], arms: Sequence[Arm], step: int) -> Callable[[Arm], Prefill]:
    """Return what prefills the caches of each arm: its own, or copies of those that several settings share."""
    plan = planner(model)
    shared = OncePrefilled(model, plan, [arm for arm, s in zip(arms, settings, strict=True) if s.once], step)

    def with_arm(make: Callable[[], list[Any]]) -> Prefill:
        def prefilled(sample: Sample) -> list[Any]:
            caches = make()
            reseed_random(caches, sample.fields["seed"])
            return prefill_caches(model, caches, sample.ids[: sample.shared], step)

        return prefilled

    prefills = {OFF.name: with_arm(OFF.caches(model))}
    for setting, arm in zip(settings, arms, strict=True):
        prefills[arm.name] = shared.prefill_for(arm) if setting.once else with_arm(arm.caches(model, plan))
    return lambda arm: prefills[arm.name]


class OncePrefilled:
    """Caches with a text that was prefilled without eviction, for arms that differ in sinks and eviction."""

    def __init__(self, model: Any, plan: Callable[[KVConfig], Any], arms: Sequence[Arm], step: int) -> None:
        policies = [arm.config.evict.policy for arm in arms]
        calibrated = [policy for policy in policies if isinstance(policy, CalibratedPolicy)]
        if any(policy.recalibrates for policy in calibrated):
            raise ConfigError(
                "a policy that calibrates again changes its scores while a text is read. Measure without --once."
            )
        reader: Any = Recency()
        if calibrated:  # the text calibrates all of them
            covariance = any(policy.needs_covariance and policy.file is None for policy in calibrated)
            kind = ExpectedAttention if covariance else TriAttention
            reader = kind(warmup=calibrated[0].warmup, calibration=TEXT)
        evict = EvictConfig(reader, "100%", "off")
        self._model, self._step = model, step
        self._plans = {arm.name: plan(arm.config) for arm in arms}
        self._readers = {arm.config.sinks: plan(replace(arm.config, evict=evict)) for arm in arms}
        self._ids: list[int] = []
        self._caches: dict[int, list[Any]] = {}  # by sinks

    def prefill_for(self, arm: Arm) -> Prefill:
        def prefilled(sample: Sample) -> list[Any]:
            caches = copy.deepcopy(self._prefilled(sample.ids[: sample.shared], arm.config.sinks))
            sequence, plan = layer_group_of(caches), self._plans[arm.name]
            sequence.plan = plan.eviction
            for number, layer in enumerate(plan.layers):
                if layer.queries is not None and number in sequence.calibrators:
                    sequence.calibrators[number].stats = layer.queries
            reseed_random(caches, sample.fields["seed"])
            begin_pass(caches, 1)  # evicts here, once, and not with every question
            return caches

        return prefilled

    def _prefilled(self, ids: list[int], sinks: int) -> list[Any]:
        if ids != self._ids:
            self._ids, self._caches = ids, {}
        if sinks not in self._caches:
            self._caches[sinks] = prefill_caches(self._model, build_caches(self._readers[sinks]), ids, self._step)
        return self._caches[sinks]


def check_settings(arms: Sequence[Arm], settings: Sequence[Setting], length: int, warmup: int, step: int) -> None:
    """Raise ConfigError before the first cell if a setting would evict nothing at the shortest length."""
    for setting, arm in zip(settings, arms, strict=True):
        policy = arm.config.evict.policy
        calibrates = isinstance(policy, CalibratedPolicy) and not (policy.file or policy.uses_auto_calibration)
        most = max(int(setting.retention / 100 * length), arm.config.window + 1) + setting.trigger
        if most >= length or (calibrates and warmup + step > length):
            raise ConfigError(
                f"{setting.name} evicts nothing of {length:,} tokens: a round begins {setting.trigger} tokens above "
                f"the budget, and after {warmup:,} tokens of calibration. Take longer texts, or smaller "
                "--triggers, --warmup or --step."
            )


def survival(record: Record) -> float:
    """Return the share of a needle's tokens to which the question could attend."""
    start, stop = record["needle"]
    return float(record["live"] / (stop - start))


def tabulate(records: Sequence[Record]) -> tuple[Columns, list[Record]]:
    """Return the columns, and a row for the uncompressed cache and each setting."""
    kinds = [kind for kind in KINDS if any(record.get("kind") == kind for record in records)]
    rows = [
        _row([record for record in records if record["name"] == name], kinds)
        for name in dict.fromkeys(record["name"] for record in records)
    ]
    return {name: lambda row, name=name: row[name] for name in rows[0]}, rows


def _row(records: list[Record], kinds: Sequence[str]) -> Record:
    first, asked = records[0], [record for record in records if "kind" in record]
    text = next((record for record in records if "ppl" in record), None)
    alive = [survival(record) for record in asked]
    return {
        "policy": str(first.get("variant", first["name"])),
        "budget %": f"{first['retention']:g}" if "retention" in first else "-",
        "block": str(first.get("granularity", "-")),
        "trigger": "once" if first.get("once") else str(first.get("trigger", "-")),
        "sinks": str(first.get("sinks", "-")),
        "kept %": f"{100 * mean(record['kept'] for record in asked or records):.0f}",
        "rounds": f"{mean(record['rounds'] for record in asked or records):.0f}",
        "PPL %": "-" if text is None else f"{text['delta']:+.2f}",
        "±": "-" if text is None else f"{text['delta_error']:.2f}",
        "KLD": "-" if text is None else f"{text['kld']:.4f}",
        "alive %": f"{100 * mean(alive):.0f}" if alive else "-",
        "whole": f"{alive.count(1.0)}/{len(alive)}" if alive else "-",
        **{kind: count_found([record["verdict"] for record in asked if record["kind"] == kind]) for kind in kinds},
    }


def run(args: argparse.Namespace) -> None:
    sinks, lengths = whole_numbers(args.sinks, "--sinks", 0), whole_numbers(args.lengths, "--lengths")
    budgets = [float(part) for part in args.budgets.split(",")]
    if not all(0 < budget < 100 for budget in budgets):
        raise ConfigError(f"--budgets is {args.budgets!r}; each must be above 0 and below 100 percent.")
    blocks, triggers = whole_numbers(args.granularities, "--granularities"), whole_numbers(args.triggers, "--triggers")
    settings = grid(args.policies.split(","), budgets, blocks, triggers, sinks, once=args.once)
    base, text = Request.from_args(args).config, read_text(args.text)
    arms = [setting.arm(base, args.warmup) for setting in settings]
    shortest = [*([args.length - 1] if args.chunks else []), *(lengths if args.seeds else [])]
    if not shortest:
        raise ConfigError("--chunks and --seeds are both 0: there is nothing to measure. Make one of them 1 or more.")
    check_settings(arms, settings, min(shortest), args.warmup, args.step)
    # Settings, texts and scenes are in the keys of the records, so a file can take more of them later.
    base_arm = Arm("base", replace(base, sinks=max(sinks), evict=None))
    results = open_results(args, "sweep", ("warmup", "step", "max_tokens"), [base_arm], resume=True)
    model, tokenizer = load_model(args)
    calibrate_model(model, tokenizer, *(arm.config for arm in arms))
    if args.chunks:
        chunks = cut_chunks(tokenizer, text, args.chunks, args.length)
        in_rounds = [replace(setting, once=False) for setting in settings]
        sweep_text(model, chunks, in_rounds, base, results, warmup=args.warmup, step=args.step)
    if args.seeds:
        cells = {"kinds": args.kinds.split(","), "lengths": lengths, "seeds": range(args.seeds)}
        cells["depths"] = parse_depths(args.depths)
        options = {"sinks": max(sinks), "warmup": args.warmup, "step": args.step, "max_tokens": args.max_tokens}
        sweep_needles(model, tokenizer, text, settings, base, results, **cells, **options)
    note = "alive: share of a needle's tokens to which the question could attend; whole: needles with all of them"
    results.show("Cost of eviction", *tabulate(list(results.rows.values())), note)


def build_parser() -> argparse.ArgumentParser:
    parser = study_parser("Study what eviction costs, setting by setting.", 2048)
    for flag, default, text in (
        ("--policies", POLICIES, "with options as --kv-evict takes them"),
        ("--budgets", "95,90,85,80,75,65,50,25,10", "percentages of the tokens seen that stay"),
        ("--granularities", "1", "tokens that are evicted together: 1, 8, 16, 32, 64"),
        ("--triggers", "128", "tokens above the budget at which a round begins"),
        ("--sinks", "128", "first tokens that are never evicted; modes v1 and v2 always take 0"),
        ("--kinds", ",".join(KINDS), "kinds of needles"),
        ("--lengths", "2048", "tokens of the prompts"),
        ("--depths", "start,middle,end", "positions of the needles: start, middle, end or 0 to 1"),
    ):
        parser.add_argument(flag, default=default, metavar="A,B,...", help=text)
    parser.add_argument("--once", action="store_true", help="prefill each text once and evict before the question")
    for flag, number, text in (
        ("--warmup", 1024, "tokens whose queries calibrate TriAttention; no eviction before"),
        ("--seeds", 3, "scenes for each kind, length and depth; 0 for no needles"),
        ("--chunks", 3, "pieces of the text; 0 for no text"),
        ("--step", 128, "tokens per prefill step"),
        ("--max-tokens", 64, "maximum tokens per answer"),
    ):
        parser.add_argument(flag, type=int, default=number, metavar="N", help=text)
    return parser


if __name__ == "__main__":
    run_study("sweep", build_parser(), run)
