"""What eviction costs, setting by setting: a text predicted, needles found, and how much of each needle survived."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from mlx_tq.config import KVConfig
from mlx_tq.errors import ConfigError
from mlx_tq.evaluate.arms import OFF, Arm
from mlx_tq.evaluate.asking import Answer, ask, read_text
from mlx_tq.evaluate.divergence import summarize_divergence
from mlx_tq.evaluate.draws import draw_anew
from mlx_tq.evaluate.needle import VOID
from mlx_tq.evaluate.once import Make, Readings
from mlx_tq.evaluate.passes import Advance, evicted, read_side_by_side
from mlx_tq.evaluate.perplexity import summarize_perplexity
from mlx_tq.evaluate.scenes import SPREAD, Planted, plant
from mlx_tq.evaluate.settings import Setting
from mlx_tq.policies import CalibratedPolicy
from mlx_tq.prompt_cache.compressed import planner

# Text is read by this many settings beside one fp16 cache: few, so that a stopped sweep loses little.
_SIDE_BY_SIDE = 9
# Of the context, sinks and window may take this much: what they keep, no policy kept.
_PROTECTED = 8

Record = dict[str, Any]
Known = Callable[[str], Record | None]
# Told each needle cell under its key, and whether it was measured just now.
Report = Callable[[str, Record, bool], None]


@dataclass(frozen=True)
class TextCell:
    """How a setting predicts a text.

    Attributes:
        tokens: scored.
        ppl: perplexity.
        delta: its change against the fp16 cache in percent.
        delta_error: its standard error.
        kld: mean KL divergence from the fp16 cache, in nats.
        kld_error: its standard error.
        top1: share of the tokens whose most likely next token is the same, in percent.
        rounds: of eviction, in all chunks.
        kept: of the tokens seen, the share still in the cache at the end of the last chunk.
    """

    tokens: int
    ppl: float
    delta: float
    delta_error: float
    kld: float
    kld_error: float
    top1: float
    rounds: int
    kept: float


@dataclass(frozen=True)
class NeedleCell:
    """One question asked under one setting.

    Attributes:
        kind: of the scene, see `scenes.KINDS`.
        length: of the prompt in tokens.
        depth: asked for, 0 to 1.
        seed: of the scene.
        index: of the needle that is asked for.
        needle: its first token, and the one after its last.
        live: how many of its tokens the question could attend to.
        rounds: of eviction until then.
        kept: of the tokens seen, the share still in the cache then.
        verdict: see `scenes.Planted.verdict`, or VOID where the fp16 cache did not pass either.
        expected: the answer that passes.
        answer: what was generated; nothing in a void cell.
    """

    kind: str
    length: int
    depth: float
    seed: int
    index: int
    needle: tuple[int, int]
    live: int
    rounds: int
    kept: float
    verdict: str
    expected: str
    answer: str


def sweep_text(
    model: Any,
    chunks: list[list[int]],
    settings: Sequence[Setting],
    base: KVConfig,
    *,
    warmup: int,
    step: int,
    known: Known,
    report: Callable[[str, Record], None],
    advance: Advance = lambda tokens: None,
) -> None:
    """Read the chunks under every setting; `report` is told the key and the cell of each that was not known.

    Raises:
        ConfigError: a setting that cannot be met, or one that evicts nothing.
    """
    size = len(chunks), len(chunks[0])
    for group in _groups(settings, known, *size):
        arms = [Arm(setting.name, setting.config(base, warmup)) for setting in group]
        baseline, *scores = read_side_by_side(model, chunks, arms, step, advance)
        for setting, found in zip(group, scores, strict=True):
            _check_evicted(setting, found.rounds, len(chunks[-1]), warmup)
            perplexity = summarize_perplexity(setting.name, found, baseline.nll)
            divergence = summarize_divergence(setting.name, found)
            cell = TextCell(
                perplexity.tokens,
                perplexity.ppl,
                perplexity.delta,
                perplexity.delta_error,
                divergence.kld,
                divergence.kld_error,
                divergence.top1,
                found.rounds,
                found.kept,
            )
            report(text_key(setting, *size), _record(setting, cell))


def text_passes(settings: Sequence[Setting], known: Known, chunks: int, length: int) -> int:
    """How often `sweep_text` will read the chunks."""
    return sum(1 + len(group) for group in _groups(settings, known, chunks, length))


def _groups(settings: Sequence[Setting], known: Known, chunks: int, length: int) -> list[list[Setting]]:
    """Settings whose text cell is missing, those that are read side by side together."""
    left = [setting for setting in settings if known(text_key(setting, chunks, length)) is None]
    return [left[start : start + _SIDE_BY_SIDE] for start in range(0, len(left), _SIDE_BY_SIDE)]


def sweep_needles(
    model: Any,
    tokenizer: Any,
    text: str,
    settings: Sequence[Setting],
    base: KVConfig,
    *,
    sinks: int,
    kinds: Sequence[str],
    lengths: Sequence[int],
    depths: Sequence[float],
    seeds: Iterable[int],
    warmup: int,
    step: int,
    max_tokens: int,
    known: Known,
    report: Report,
) -> None:
    """Ask every setting about every scene, the fp16 cache first; all settings answer the same scenes.

    Args:
        model: to ask.
        tokenizer: of the model.
        text: what surrounds the needles.
        settings: to compare.
        base: the rest of the configuration.
        sinks: tokens at the start that no needle lies in; at least that of every setting.
        kinds: of scenes.
        lengths: of the prompts in tokens.
        depths: of the needles, 0 to 1.
        seeds: of the scenes.
        warmup: tokens that calibrate.
        step: tokens read at a time.
        max_tokens: of an answer.
        known: finds a cell that was measured before, by its key.
        report: told the cell of each question.

    Raises:
        ConfigError: a scene or a setting that cannot be met, or one that evicts nothing.
    """
    check_protected(sinks, base.window, min(lengths))
    makers = _makers(model, settings, base, warmup, step)
    for seed, length, kind in product(seeds, lengths, kinds):
        for depth in (0.5,) if kind in SPREAD else depths:
            planted = plant(kind, tokenizer, text, depth, seed, tokens=length, sinks=sinks, window=base.window)
            void: set[int] = set()
            for setting, make in makers:
                keys = {index: needle_key(setting, kind, length, depth, seed, index) for index in planted.asked}
                found = {index: known(key) for index, key in keys.items()}
                if any(record is None for record in found.values()):
                    caches = make(planted.scene.ids, seed)
                for index, key in keys.items():
                    record = found[index]
                    if record is None:
                        limit = 0 if index in void else max_tokens
                        copied = copy.deepcopy(caches)
                        answer = _ask(model, tokenizer, planted, index, copied, limit)
                        rounds, kept = evicted(copied)
                        if setting is not None:
                            _check_evicted(setting, rounds, length, warmup)
                        verdict = VOID if index in void else planted.verdict(index, answer.text)
                        place = planted.scene.needles[index]
                        expected = planted.facts[index].answer
                        where = (kind, length, depth, seed, index, place, answer.live, rounds, kept)
                        record = _record(setting, NeedleCell(*where, verdict, expected, answer.text))
                    report(key, record, found[index] is None)
                    if setting is None and record["verdict"] != "PASS":
                        void.add(index)


def _makers(
    model: Any, settings: Sequence[Setting], base: KVConfig, warmup: int, step: int
) -> list[tuple[Setting | None, Make]]:
    """For the fp16 cache and each setting, what makes caches that hold a text."""

    def reads(make: Callable[[], list[Any]], ids: list[int], number: int) -> list[Any]:
        caches = make()
        draw_anew(caches, number)
        read_text(model, ids, caches, step)
        return caches

    configs = {setting: setting.config(base, warmup) for setting in settings}
    plan = planner(model)
    readings = Readings(model, plan, [config for setting, config in configs.items() if setting.once], step)
    made: list[tuple[Setting | None, Make]] = [(None, partial(reads, OFF.caches(model)))]
    for setting, config in configs.items():
        own = readings.maker(config) if setting.once else partial(reads, Arm(setting.name, config).caches(model, plan))
        made.append((setting, own))
    return made


def _ask(model: Any, tokenizer: Any, planted: Planted, index: int, caches: list[Any], limit: int) -> Answer:
    scene = planted.scene
    return ask(model, tokenizer, scene.questions[index], caches, scene.needles[index], limit)


def check_protected(sinks: int, window: int, length: int) -> None:
    """Raise where sinks and window are so much of the context that they would decide the result.

    Raises:
        ConfigError: they are more than an eighth.
    """
    if (sinks + window) * _PROTECTED > length:
        raise ConfigError(
            f"sinks {sinks} and window {window} are more than an eighth of {length:,} tokens, and nothing in them is "
            f"ever evicted. Take --lengths from {(sinks + window) * _PROTECTED:,}, or smaller --prefixes and "
            "--kv-window."
        )


def check_settings(settings: Sequence[Setting], window: int, lengths: Iterable[int], warmup: int, step: int) -> None:
    """Raise before the first cell where one of a sweep would evict nothing.

    Raises:
        ConfigError: a setting's trigger or the calibration is not reached at the shortest length.
    """
    length = min(lengths)
    for setting in settings:
        config = setting.config(KVConfig(window=window, sinks=setting.sinks), warmup).evict
        policy = None if config is None else config.policy
        calibrates = isinstance(policy, CalibratedPolicy) and not (policy.file or policy.uses_auto_calibration)
        most = max(int(setting.retention / 100 * length), window + 1) + setting.trigger
        if most >= length or (calibrates and warmup + step > length):
            raise _nothing_evicted(setting, length, warmup)


def _check_evicted(setting: Setting, rounds: int, length: int, warmup: int) -> None:
    if not rounds:
        raise _nothing_evicted(setting, length, warmup)


def _nothing_evicted(setting: Setting, length: int, warmup: int) -> ConfigError:
    return ConfigError(
        f"{setting.name} evicts nothing of {length:,} tokens: a round begins {setting.trigger} tokens above the "
        f"budget, and after {warmup:,} tokens of calibration. Take longer texts, or smaller --triggers, --warmup or "
        "--step."
    )


def text_key(setting: Setting, chunks: int, length: int) -> str:
    """The key of a text cell in results."""
    return f"{setting.name} | text {chunks} x {length}"


def needle_key(setting: Setting | None, kind: str, length: int, depth: float, seed: int, index: int) -> str:
    """The key of a needle cell in results; without a setting, of the fp16 cache."""
    return f"{OFF.name if setting is None else setting.name} | {kind} {length} {depth:g} {seed} {index}"


def _record(setting: Setting | None, cell: TextCell | NeedleCell) -> Record:
    """Plain data: the name and the fields of the setting, and those of the cell."""
    about = {"name": OFF.name} if setting is None else {"name": setting.name, **vars(setting)}
    return {**about, **vars(cell)}
