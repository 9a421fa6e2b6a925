"""What commands show. The answer goes to stdout; everything else, through here, to stderr."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby, pairwise
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mlx_tq.cache.spec import LEARNED
from mlx_tq.cli.foreign_text import readable
from mlx_tq.kernels import backend, thresholds
from mlx_tq.prompt_cache.archive import LIMIT
from mlx_tq.prompt_cache.eviction import EvictionPlan
from mlx_tq.prompt_cache.plan import LayerPlan, Plan
from mlx_tq.prompt_cache.statistics import CacheStats, predict_stats
from mlx_tq.session.shadow_mode import ShadowReport
from mlx_tq.session.transcript import Quotation
from mlx_tq.session.turn import TurnStats

_WIDTH = 120  # where there is no terminal to ask


def _console(*, stderr: bool) -> Console:
    made = Console(stderr=stderr, highlight=False)
    if not made.is_terminal:
        made.width = _WIDTH
    return made


console = _console(stderr=True)
results = _console(stderr=False)  # for commands whose answer is a table


def human_bytes(count: float) -> str:
    """Bytes as people write them, such as 1.5 MB."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def table(title: str, *columns: str) -> Table:
    """A plain table; the first column is text, the others are numbers."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i == 0 else "right", no_wrap=i > 0)
    return made


def _layer_range(layers: list[LayerPlan]) -> str:
    first, last = layers[0].slot.index, layers[-1].slot.index
    return f"{first}" if first == last else f"{first}-{last}"


def show_plan(plan: Plan, tokens: int, beside: str | None = None) -> None:
    """Print how each group of layers is stored and the bytes at a context of `tokens`.

    Args:
        plan: of the caches.
        tokens: of the context.
        beside: what keeps rows from coming back, if anything does.
    """
    shown = table(f"KV cache of {plan.model_type}, {tokens:,} tokens", "layers", "keys", "values", "bytes", "fp16", "")
    shown.columns[-1].no_wrap, shown.columns[-1].justify = False, "left"  # a long note must not squeeze the figures
    for _, group in groupby(plan.layers, key=lambda layer: (layer.spec.keys, layer.spec.value, layer.note)):
        layers = list(group)
        size = sum(layer.nbytes(plan.live(tokens)) for layer in layers)
        fp16 = sum(layer.fp16_nbytes(tokens) for layer in layers)
        spec, note = layers[0].spec, layers[0].note
        shown.add_row(_layer_range(layers), spec.keys, spec.value, human_bytes(size), human_bytes(fp16), note)
    compressed = {layer.slot.index for layer in plan.layers}
    others = [name for index, name in enumerate(plan.classes) if index not in compressed]
    for name in sorted(set(others)):
        shown.add_row(f"{others.count(name)} others", "as they are", "", "", "", name)
    console.print(shown)
    if not plan.ranks.is_alone:
        heads = ", ".join(str(heads) for heads in sorted({layer.slot.heads for layer in plan.layers}))
        console.print(f"{plan.ranks.size} ranks; KV heads of a layer on each: {heads}; bytes are of one rank")
    spec = plan.layers[0].spec
    console.print(
        f"in the model's own type, {plan.layers[0].slot.dtype}: the first {spec.sinks} tokens, the last {spec.window} "
        "and up to 63 before those\n"
        f"computed by {backend.describe()}; thresholds {thresholds.table().origin}",
        style="dim",
        soft_wrap=True,
    )
    if plan.allocation is not None:
        found = plan.allocation
        console.print(
            f"formats for {found.asked:g} bits a value take {found.bits:.2f}, and lose about {found.loss:.2g} nats",
            style="dim",
            soft_wrap=True,
        )
    if any(layer.spec.normalize for layer in plan.layers):
        console.print(
            f"keys are stored less the mean of their block, weighted by what the first {LEARNED} tokens' queries read",
            style="dim",
            soft_wrap=True,
        )
    if any(layer.spec.cold for layer in plan.layers):
        console.print(f"of two key formats, {plan.config.recent} packed tokens have the first", style="dim")
    if plan.eviction is not None:
        console.print(describe_eviction(plan.eviction, beside), style="dim", markup=False, soft_wrap=True)
        console.print(describe_places(predict_stats(plan, tokens)), style="dim", markup=False, soft_wrap=True)
    decoded = sorted({f"{layer.spec.keys}/{layer.spec.value}" for layer in plan.layers if not layer.has_kernels})
    if decoded:
        console.print(
            f"no GPU kernels for {', '.join(decoded)}: attention decodes with mlx's operations",
            style="dim",
            soft_wrap=True,
        )


def describe_eviction(plan: EvictionPlan, beside: str | None = None) -> str:
    """Policy, budget, calibration and recall in a line; `beside` is what keeps rows from coming back."""
    config, tokens = plan.config, plan.budget.tokens
    budget = f"{tokens:,} tokens" if tokens is not None else f"{config.budget} of the tokens"
    line = f"eviction: {config.policy} keeps {budget}"
    line = f"{line}, calibrated on {plan.source}" if plan.source else line
    if beside is not None:
        return f"{line}; no rows come back beside {beside}"
    if not config.recalls:
        return line
    limit = config.archive_limit
    most = f"{human_bytes(LIMIT)} or a tenth of the free disk" if limit is None else human_bytes(limit)
    return f"{line}; what leaves is archived on disk until the run ends, up to {most}"


def describe_places(stats: CacheStats) -> str:
    """Say in one line how many tokens are in memory, archived and dropped."""
    archived = f"{stats.archived:,} archived ({human_bytes(stats.archived_nbytes)})"
    return f"Tokens: {stats.live:,} in memory ({human_bytes(stats.nbytes)}), {archived}, {stats.dropped:,} dropped"


def warn(message: str) -> None:
    """Print a warning."""
    console.print(f"[yellow]warning:[/yellow] {escape(readable(message))}", soft_wrap=True)


def show_recalled(positions: Sequence[int], by_meaning: Sequence[int], archived: int, seconds: float) -> None:
    """Print what came back from the archive, and which of it the rescue service's search named."""
    came = f"tokens {_ranges(positions)}" if positions else "nothing"
    named = f", by search {_ranges(by_meaning)}," if by_meaning else ""
    said = f"recalled: {came}{named} of {archived:,} archived ({1000 * seconds:.0f} ms)"
    console.print(said, style="cyan", soft_wrap=True)


def show_quoted(quotation: Quotation, seconds: float) -> None:
    """Print what came back as text, if anything did."""
    if quotation.ids:
        spans = ", ".join(f"{start:,}-{stop:,}" for start, stop in quotation.ranges)
        console.print(f"brought back: tokens {spans} ({1000 * seconds:.0f} ms)", style="cyan")


def show_shadow(report: ShadowReport) -> None:
    """Print what a compressed cache would have changed."""
    if not report.layers:
        console.print("shadow: the answer was too short for a comparison", style="dim")
        return
    console.print(
        f"what the compressed cache would have changed, in {report.comparisons} comparisons, the last with "
        f"{report.packed:,} tokens packed:",
        soft_wrap=True,
    )
    shown = table("", "layer", "cosine", "least", "KLD of weights", "most")
    for layer in report.layers:
        cosines = f"{layer.cosine:.5f}", f"{layer.least_cosine:.5f}"
        shown.add_row(str(layer.index), *cosines, f"{layer.kld:.2g}", f"{layer.most_kld:.2g}")
    console.print(shown)
    if report.kld is None:
        console.print("predictions were not compared: a cache of this model cannot go back a token", style="dim")
        return
    worst = ", ".join(f"{token.text!r} at {token.position:,} ({token.kld:.2g})" for token in report.worst)
    console.print(
        f"predictions of {len(report.tokens)} tokens: KLD {report.kld:.2g}, the same most likely token in "
        f"{report.top1:.1f} %; worst {readable(worst)}",
        markup=False,
        soft_wrap=True,
    )


def _ranges(positions: Sequence[int]) -> str:
    """Each run of neighbors, as first and past the last."""
    cuts = [place for place, (at, after) in enumerate(pairwise(positions), 1) if after > at + 1]
    runs = pairwise([0, *cuts, len(positions)])
    return ", ".join(f"{positions[start]:,}-{positions[stop - 1] + 1:,}" for start, stop in runs if stop > start)


def show_cache(cache: CacheStats) -> None:
    """Print what a prompt cache takes."""
    compared = f"; fp16 takes {human_bytes(cache.fp16_nbytes)}, {cache.ratio:.2f}x as much"
    if cache.nbytes == cache.fp16_nbytes:
        compared = ""
    elif cache.ratio < 1:
        compared += " (so short a text is in the model's own type, and its buffers are larger)"
    console.print(f"KV cache: {cache.tokens:,} tokens in {human_bytes(cache.nbytes)}{compared}", soft_wrap=True)
    if cache.rounds:
        rounds = "1 round" if cache.rounds == 1 else f"{cache.rounds} rounds"
        console.print(
            f"evicted: {cache.evicted:,} tokens in {rounds} ({cache.evict_seconds:.2f} s); "
            f"{100 * cache.retention:.1f} % stayed",
            soft_wrap=True,
        )
    if cache.clamped:
        warn(f"{cache.clamped:,} vectors exceeded fp16's range and were clamped; --kv-profile off keeps them.")


def show_stats(stats: TurnStats, cache: CacheStats) -> None:
    """Print the numbers of a generation."""
    if stats.generation_tokens:
        console.print(
            f"prompt: {stats.prompt_tokens:,} tokens, {_stored(stats)}{stats.prompt_tps:.1f} tok/s, "
            f"first token after {stats.ttft:.2f} s\n"
            f"generation: {stats.generation_tokens:,} tokens, {stats.generation_tps:.1f} tok/s ({stats.finish_reason})"
        )
    else:
        console.print(f"prompt: {stats.prompt_tokens:,} tokens, {stats.finish_reason} before the first token")
    show_cache(cache)
    if cache.rounds:
        console.print(describe_places(cache), soft_wrap=True)
    console.print(f"peak memory: {human_bytes(stats.peak_memory)}")


def _stored(stats: TurnStats) -> str:
    if not stats.cached_tokens:
        return ""
    return f"{stats.cached_tokens:,} of them from the store in {stats.restore_seconds:.2f} s, "


def plan_dict(plan: Plan, tokens: int) -> dict[str, Any]:
    """A plan as plain data, with bytes at a context of `tokens`."""
    return {
        "model_type": plan.model_type,
        "config": plan.config.to_dict(),
        "layers": [
            {
                "index": layer.slot.index,
                "part": layer.slot.part,
                "key": layer.spec.keys,
                "value": layer.spec.value,
                "has_kernels": layer.has_kernels,
                "note": layer.note,
                "nbytes": layer.nbytes(plan.live(tokens)),
                "fp16_nbytes": layer.fp16_nbytes(tokens),
            }
            for layer in plan.layers
        ],
        "caches": plan.classes,
        "cache": predict_stats(plan, tokens).to_dict(),
        "eviction": None
        if plan.eviction is None
        else {
            "policy": str(plan.eviction.config.policy),
            "budget_tokens": plan.eviction.budget.tokens,
            "budget_share": plan.eviction.budget.share,
            "calibration": plan.eviction.source,
            "recall": plan.eviction.config.recall,
            "archive_limit": plan.eviction.config.archive_limit,
        },
        **({} if plan.allocation is None else {"allocation": asdict(plan.allocation)}),
        "attention": backend.describe(),
        "thresholds": thresholds.table().origin,
    }
