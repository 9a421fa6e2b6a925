"""Can the model still find a fact that lies wholly in the packed body? Greedy, strict, and void where fp16 fails."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from mlx_tq.cli.needles.haystack import build_case, verdict
from mlx_tq.errors import ConfigError
from mlx_tq.evaluate.arms import OFF, Arm
from mlx_tq.evaluate.asking import Answer, ask, read_text
from mlx_tq.evaluate.passes import check_evicted
from mlx_tq.integration.probe import position_limit

VOID = "VOID"
DEPTHS = {"start": 0.0, "middle": 0.5, "end": 1.0}


@dataclass(frozen=True)
class Cell:
    """One question asked of one arm.

    Attributes:
        name: of the arm.
        tokens: of the prompt.
        depth: asked for, 0 to 1.
        seed: of the case.
        needle: first token of the planted sentence, and the one after its last.
        live: how many of its tokens the cache still held as the question was read.
        packed: how many of them were in the packed body by then.
        verdict: a `haystack.Verdict`, or VOID where the fp16 cache did not pass either.
        expected: the answer that passes.
        answer: what was generated.
    """

    name: str
    tokens: int
    depth: float
    seed: int
    needle: tuple[int, int]
    live: int
    packed: int
    verdict: str
    expected: str
    answer: str

    @property
    def key(self) -> str:
        """The name of a cell, unique in a grid."""
        return cell_key(self.name, self.tokens, self.depth, self.seed)


def cell_key(name: str, tokens: int, depth: float, seed: int) -> str:
    """The key of a cell in results."""
    return f"{name} {tokens} {depth:g} {seed}"


def measure_needles(
    model: Any,
    tokenizer: Any,
    text: str,
    arms: Sequence[Arm],
    *,
    lengths: Sequence[int],
    depths: Iterable[float] = tuple(DEPTHS.values()),
    seeds: Iterable[int] = range(3),
    step: int = 512,
    max_tokens: int = 64,
    known: Callable[[str], dict[str, Any] | None] = lambda key: None,
    report: Callable[[Cell], None] = lambda cell: None,
) -> list[Cell]:
    """Ask every arm at every length, depth and seed, the fp16 cache first.

    Args:
        model: to ask.
        tokenizer: of the model.
        text: what surrounds the needles.
        arms: to compare; they must agree on sinks and window, so that all answer the same cases.
        lengths: of the prompts in tokens.
        depths: of the needles, 0 to 1.
        seeds: of the cases.
        step: tokens read at a time.
        max_tokens: of an answer.
        known: finds the fields of a cell that was measured before, by its key.
        report: told each cell.

    Raises:
        ConfigError: arms that disagree, one that evicts nothing though it should, lengths beyond the model's positions,
            or a text too short.
    """
    compressed = [arm for arm in arms if not arm.config.is_off]
    regions = {(arm.config.sinks, arm.config.window) for arm in compressed or [OFF]}
    if len(regions) > 1:
        raise ConfigError(f"the arms have different prefixes and windows: {sorted(regions)}. Give them one each.")
    ((sinks, window),) = regions
    limit = position_limit(model)
    if limit is not None and max(lengths) + max_tokens > limit:
        raise ConfigError(
            f"{max(lengths):,} tokens and an answer of {max_tokens} exceed the model's {limit:,} positions. Take "
            f"--lengths up to {limit - max_tokens:,}."
        )
    makers = [arm.caches(model) for arm in (OFF, *compressed)]
    cells = []
    for tokens, depth, seed in product(lengths, depths, seeds):
        case = build_case(tokenizer, text, tokens=tokens, depth=depth, seed=seed, sinks=sinks, window=window)
        void = False
        for arm, make in zip((OFF, *compressed), makers, strict=True):
            before = known(cell_key(arm.name, tokens, depth, seed))
            if before is not None:
                cell = Cell(**{**before, "needle": tuple(before["needle"])})
            else:
                found = Answer("", 0, 0)
                if not void:
                    caches = make()
                    read_text(model, case.ids[: case.question], caches, step)
                    found = ask(model, tokenizer, case.ids[case.question :], caches, case.needle, max_tokens)
                    check_evicted(arm.name, caches)
                outcome = VOID if void else verdict(found.text, case.answer).value
                whereabouts = (case.needle, found.live, found.packed)
                cell = Cell(arm.name, tokens, depth, seed, *whereabouts, outcome, case.answer, found.text)
            void = void or (arm is OFF and cell.verdict != "PASS")
            report(cell)
            cells.append(cell)
    return cells
