"""Show plans, statistics, warnings and progress on stderr; only answers go to stdout."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import accumulate, groupby
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from mlx_tq.cli.terminal_text import readable
from mlx_tq.distributed.group import Ranks
from mlx_tq.kernels import backend, thresholds
from mlx_tq.policies.heads import Division
from mlx_tq.prompt_cache.layer_bytes import RegionBytes, native_capacity
from mlx_tq.prompt_cache.layer_group import EvictionPlan
from mlx_tq.prompt_cache.plan import LayerPlan, Plan
from mlx_tq.prompt_cache.statistics import CacheStats, predict_stats
from mlx_tq.session import Session
from mlx_tq.session.shadow_mode import ShadowReport
from mlx_tq.session.turn import TurnStats

_BAR_WIDTH, _SHORTEST_BAR = 40, 8  # cells


def make_console(*, stderr: bool) -> Console:
    """Return a console that prints text as it is: no markup, no line breaks but those of the terminal."""
    made = Console(stderr=stderr, highlight=False, markup=False, soft_wrap=True)
    if not made.is_terminal:
        made.width = 120
    return made


stderr = make_console(stderr=True)
stdout = make_console(stderr=False)  # for commands whose answer is a table


def human_bytes(count: float) -> str:
    """Return bytes as people write them, such as 1.5 MB."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def table(title: str, *columns: str) -> Table:
    """Return a plain table; the first column is text, the others are numbers."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i == 0 else "right", no_wrap=i > 0)
    return made


def warn(message: str) -> None:
    stderr.print(Text.assemble(("warning:", "yellow"), f" {readable(message)}"), soft_wrap=not stderr.is_terminal)


def note(text: str) -> None:
    """Print a remark that an answer does not depend on; a terminal breaks it between words."""
    stderr.print(text, style="dim", soft_wrap=not stderr.is_terminal)


class _TokenRate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:,.0f} tok/s")


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal; yield the function that advances it by units of work."""
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        task = progress.add_task(title, total=total)
        yield lambda done: progress.advance(task, done)


@contextmanager
def prefill_progress(*, title: str = "Prefilling", show: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on a terminal; yield mlx-lm's progress callback (processed, total)."""
    if not show or not stderr.is_terminal:
        yield lambda processed, total: None
        return
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), _TokenRate(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, transient=True) as progress:
        task = progress.add_task(title, total=None)

        def advance(processed: int, total: int) -> None:
            progress.update(task, completed=processed, total=total)
            if processed >= total:
                progress.stop()

        yield advance


@contextmanager
def logged_progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on a terminal; elsewhere, as in the log of a server, a line for each tenth of the work."""
    if stderr.is_terminal:
        with prefill_progress(title=title) as advance:
            yield advance
        return
    began, shown = time.monotonic(), 0

    def write(processed: int, total: int) -> None:
        nonlocal shown
        share = processed / total
        if not processed:
            note(title)
        elif int(10 * share) > shown:
            shown = int(10 * share)
            seconds = (time.monotonic() - began) * (1 - share) / share
            note(f"{title}: {share:.0%}, about {seconds:.0f} s left")

    yield write


def show_plan(plan: Plan, tokens: int, recall_blocker: str | None = None) -> None:
    """Print how each group of layers is stored, and the bytes of a context of `tokens`."""
    # Before tokens are compressed, the sizes differ by what each cache reserves.
    native = f"{plan.native_dtype} cache" if tokens >= plan.compressed_from else ""
    rows = table(f"KV cache of {plan.name}, {tokens:,} tokens", "layers", "keys", "values", "bytes", native, "")
    rows.columns[-1].no_wrap, rows.columns[-1].justify = False, "left"  # a long note must not squeeze the figures
    sized = zip(plan.layers, plan.layers_at(tokens), strict=True)
    for _, group in groupby(sized, key=lambda pair: (pair[0].spec.keys, pair[0].spec.value, pair[0].note)):
        layers, nbytes = zip(*group, strict=True)
        size = sum(layer.allocated for layer in nbytes)
        native_size = sum(layer.native_nbytes(tokens) for layer in layers)
        spec, indices = layers[0].spec, sorted({layers[0].slot.index, layers[-1].slot.index})
        sizes = human_bytes(size), human_bytes(native_size) if native else ""
        rows.add_row("-".join(map(str, indices)), spec.keys, spec.value, *sizes, layers[0].note)
    compressed = {layer.slot.index for layer in plan.layers}
    others = [name for index, name in enumerate(plan.classes) if index not in compressed]
    for name in sorted(set(others)):
        rows.add_row(f"{others.count(name)} others", "unchanged", "", "", "", name)
    for reason, same in groupby(plan.uncompressed, key=lambda part: part.reason):
        parts = list(same)
        size = human_bytes(native_capacity(tokens) * sum(part.token_nbytes for part in parts))
        indices = sorted({parts[0].index, parts[-1].index})
        sizes = size, size if native else ""
        rows.add_row("-".join(map(str, indices)), "unchanged", "", *sizes, f"part {parts[0].part}: {reason}")
    stderr.print(rows)
    for line in _describe_plan(plan, tokens, recall_blocker):
        note(line)


def _describe_plan(plan: Plan, tokens: int, recall_blocker: str | None) -> Iterator[str]:
    first = plan.layers[0]
    if not plan.ranks.is_alone:
        heads = ", ".join(map(str, sorted({layer.slot.heads for layer in plan.layers})))
        yield f"{plan.ranks.size} ranks with {heads} KV heads per layer each; bytes are per rank"
    yield (
        f"Full precision ({first.slot.dtype}): first {first.spec.sinks} tokens, last {first.spec.window}, and up to 63 "
        "before those"
    )
    if plan.allocation is not None:
        bits = plan.allocation
        yield f"Formats for {bits.limit:g} bits per value take {bits.bits:.2f}; predicted loss {bits.loss:.2g} nats"
    if any(layer.spec.cold for layer in plan.layers):
        yield f"The first of two key formats is for the most recent {plan.config.recent} packed tokens"
    if plan.eviction is not None:
        if plan.division is not None:
            yield from _describe_division(plan, plan.division)
        yield _describe_eviction(plan.eviction, recall_blocker)
        yield describe_tokens(predict_stats(plan, tokens))
    pairs = sorted({f"{layer.spec.keys}/{layer.spec.value}" for layer in plan.layers if not layer.has_kernels})
    if pairs:
        yield f"No GPU kernels for {', '.join(pairs)}: attention dequantizes with mlx operations"


def _describe_division(plan: Plan, division: Division) -> Iterator[str]:
    longest = plan.eviction and plan.eviction.positions
    yield (
        f"{division.num_retrieval} of {plan.heads} KV heads keep all tokens (retrieval heads); the others (streaming "
        f"heads) see the first ones and the last {division.window}. No text is evicted, so nothing is sent to a rescue "
        "service"
    )
    lengths = dict.fromkeys([1024, 4096, *([longest] if longest else [])])
    yield "Rows kept: " + ", ".join(f"{plan.kept_share(length):.0%} of {length:,} tokens" for length in lengths)


def _describe_eviction(plan: EvictionPlan, recall_blocker: str | None) -> str:
    config, tokens = plan.config, plan.budget.tokens
    budget = f"{tokens:,} tokens" if tokens is not None else f"{config.budget} of the tokens"
    if config.policy.by_head:
        share, at, length = str(config.budget).partition("@")
        budget = f"{share} of the rows" + (f" of {int(length):,} tokens" if at else " at the model's context length")
    line = f"Eviction: {config.policy} keeps {budget}"
    line = f"{line}, calibrated on {plan.source}" if plan.source else line
    if recall_blocker is not None:
        return f"{line}; recall is disabled with {recall_blocker}"
    if not config.recalls:
        return line
    maximum = human_bytes(plan.archive_limit)
    return f"{line}; evicted tokens are archived on disk until the run ends, at most {maximum}"


def describe_tokens(stats: CacheStats) -> str:
    live = human_bytes(stats.nbytes) + (f"; {stats.recalled:,} of them recalled" if stats.recalled else "")
    archived = f"{stats.archived:,} archived ({human_bytes(stats.archived_nbytes)})"
    whose = "Tokens of streaming heads" if stats.by_head else "Tokens"
    return f"{whose}: {stats.live:,} in memory ({live}), {archived}, {stats.dropped:,} dropped"


def describe_size(stats: CacheStats) -> str:
    """Return the bytes of a cache, and those of mlx-lm's own if there is something to compare."""
    size = human_bytes(stats.nbytes)
    return f"{size}, {stats.native_dtype} cache {human_bytes(stats.native_nbytes)}" if stats.is_comparable else size


def show_restored(turn: TurnStats, *, can_recall: bool) -> None:
    """Print how many tokens were recalled for a turn, and quoted as text if any were."""
    if can_recall:
        recalled = f"Recalled {len(turn.recalled):,} of {turn.archived:,} archived tokens ({turn.recall_seconds:.1f} s)"
        partial = "; partial: a recalled sentence is incomplete" if turn.recall_is_partial else ""
        stderr.print(f"{recalled}{partial}", style="cyan")
    if turn.quotation.ids:
        quoted = f"Quoted {len(turn.quotation.ids):,} tokens of evicted text ({turn.rescue_seconds:.1f} s)"
        stderr.print(quoted, style="cyan")


def show_shadow(report: ShadowReport, native_dtype: str) -> None:
    """Print what a compressed cache would have changed, against mlx-lm's own in `native_dtype`."""
    if not report.layers:
        note("Shadow mode: the answer was too short to compare")
        return
    packed = f"{report.packed:,} tokens packed in the last one"
    against = f"against mlx-lm's {native_dtype} cache in {report.comparisons} comparisons"
    stderr.print(f"Shadow mode: the compressed cache {against}, {packed}")
    rows = table("", "layer", "cosine", "lowest", "KLD of weights", "highest")
    for layer in report.layers:
        cosines = f"{layer.cosine:.5f}", f"{layer.least_cosine:.5f}"
        rows.add_row(str(layer.index), *cosines, f"{layer.kld:.2g}", f"{layer.most_kld:.2g}")
    stderr.print(rows)
    if report.kld is None:
        note("Next tokens were not compared: caches of this model cannot be trimmed")
        return
    worst = ", ".join(f"{token.text!r} at {token.position:,} ({token.kld:.2g})" for token in report.worst)
    same = f"the same most likely token in {report.top1:.1f} %; largest KLD: {readable(worst)}"
    stderr.print(f"Next token, {len(report.tokens)} tokens: KLD {report.kld:.2g}, {same}")


def show_cache(cache: CacheStats) -> None:
    compared = ""
    if cache.is_comparable:
        compared = f"; mlx-lm's {cache.native_dtype} cache takes {human_bytes(cache.native_nbytes)}"
        compared += f", {cache.ratio:.2f}x as much" if cache.ratio > 1 else ""
    elif cache.tokens < cache.compressed_from:
        compared = f"; compression starts at {cache.compressed_from:,} tokens"
    stderr.print(f"KV cache: {cache.tokens:,} tokens in {human_bytes(cache.nbytes)}{compared}")
    if cache.rounds:
        stderr.print(describe_tokens(cache))
        stderr.print(f"eviction: {cache.rounds} round{'s' * (cache.rounds > 1)}, {cache.evict_seconds:.2f} s")
    if cache.clamped:
        warn(f"{cache.clamped:,} vectors exceeded the range of fp16 and were clamped. Use --kv-profile off.")


def show_lookup(blocker: str | None) -> None:
    """Say why prompt lookup stays off, if something keeps it off."""
    if blocker is not None:
        note(f"Prompt lookup is off: {blocker}")


def describe_drafts(turn: TurnStats) -> str:
    """Return how many drafted tokens were accepted, to follow other figures of an answer; "" without drafts."""
    drafted = turn.drafted_tokens
    return f", {turn.accepted_tokens:,} of {drafted:,} drafted tokens accepted" if drafted else ""


def show_stats(stats: TurnStats, cache: CacheStats) -> None:
    prompt, generated, reason = f"prompt: {stats.prompt_tokens:,} tokens", stats.generation_tokens, stats.finish_reason
    if generated:
        cached = f", {stats.cached_tokens:,} from the prefix cache ({stats.restore_seconds:.2f} s)"
        prompt += cached if stats.cached_tokens else ""
        stderr.print(f"{prompt}, {stats.prompt_tps:.1f} tok/s, first token after {stats.ttft:.2f} s")
        rate = f", {stats.generation_tps:.1f} tok/s" if generated > 1 else ""
        drafts = describe_drafts(stats)
        stderr.print(f"generation: {generated:,} token{'s' * (generated > 1)}{rate} ({reason}){drafts}")
    else:
        stderr.print(f"{prompt}, {reason} before the first token")
    show_cache(cache)
    stderr.print(f"peak memory: {human_bytes(stats.peak_memory)}")


def collect_stats(ranks: Ranks, cache: CacheStats, warning: str | None) -> list[dict[str, Any]]:
    """Return, on every rank, the cache statistics of each with its collective calls and its archive's warning."""
    calls = {"rank": ranks.rank, "calls": ranks.calls, "call_nbytes": ranks.nbytes, "warning": warning}
    return ranks.gather_json(cache.to_dict() | calls)


def show_ranks(stats: list[dict[str, Any]]) -> None:
    native = f"{stats[0]['native_dtype']} cache"
    rows = table("", "rank", "KV cache", native, "evicted", "collective calls", "collective bytes")
    for rank in stats:
        sizes = human_bytes(rank["nbytes"]), human_bytes(rank["native_nbytes"])
        rows.add_row(str(rank["rank"]), *sizes, *(f"{rank[name]:,}" for name in ("evicted", "calls", "call_nbytes")))
    stderr.print(rows)
    for rank in stats:
        if rank["warning"] is not None:
            warn(f"rank {rank['rank']}: {rank['warning']}")


def memory_bar(session: Session, width: int | None = None) -> Text:
    """Draw the live and evicted tokens along the context, with bytes and counts, in at most `width` cells.

    `width` is that of the terminal by default. Where it is too small for all, the bar gets shorter, and the last counts
    are left out.
    """
    stats = session.stats
    size, comma, compared = describe_size(stats).partition(",")
    parts = [
        (f" {size}", "dim"),
        (comma + compared, "dim"),
        (f"  {stats.live:,} live", "green"),
        (f"  {stats.evicted:,} evicted", "yellow"),
        *([(f"  {stats.dropped:,} dropped", "yellow")] if stats.archived and stats.dropped else []),
        *([(f"  {session.recalled_tokens:,} recalled", "cyan")] if stats.archived else []),
        (f"  {session.quoted_tokens:,} rescued", "cyan"),
        *([(f"  {stats.archived:,} archived", "cyan")] if stats.archived else []),
    ]
    if width is None and stderr.is_terminal:
        width = stderr.width
    if width is not None:
        ends = accumulate(len(text) for text, _ in parts)
        parts = [part for part, end in zip(parts, ends, strict=True) if end + _SHORTEST_BAR <= width]
        bar = min(_BAR_WIDTH, width - sum(len(text) for text, _ in parts))
    else:
        bar = _BAR_WIDTH
    total = max(session.context_length or 0, stats.tokens, 1)
    live = round(bar * stats.live / total)
    evicted = min(round(bar * stats.evicted / total), bar - live)
    drawn = [("█" * live, "green"), ("▒" * evicted, "yellow"), ("·" * (bar - live - evicted), "dim")]
    return Text.assemble(*drawn, *parts)


def plan_dict(plan: Plan, tokens: int) -> dict[str, Any]:
    """Return a plan as plain data, with the bytes of a context of `tokens`."""

    def describe_layer(layer: LayerPlan, nbytes: RegionBytes) -> dict[str, Any]:
        slot = {"index": layer.slot.index, "part": layer.slot.part}
        formats = {"key": layer.spec.keys, "value": layer.spec.value, "has_kernels": layer.has_kernels}
        sizes = {"nbytes": nbytes.allocated, "native_nbytes": layer.native_nbytes(tokens)}
        return {**slot, **formats, "note": layer.note, **sizes}

    eviction = plan.eviction and {
        "policy": str(plan.eviction.config.policy),
        "budget_tokens": plan.eviction.budget.tokens,
        "budget_share": plan.eviction.budget.share,
        "retrieval_heads": plan.eviction.retrieval_heads,
        "head_window": None if plan.division is None else plan.division.window,
        "calibration": plan.eviction.source,
        "recall": plan.eviction.config.recall,
        "archive_limit": plan.eviction.archive_limit if plan.eviction.config.recalls else None,
    }
    return {
        "model_type": plan.model_type,
        "config": plan.config.to_dict(),
        "layers": list(map(describe_layer, plan.layers, plan.layers_at(tokens))),
        "caches": plan.classes,
        "uncompressed": [
            {**asdict(part), "nbytes": native_capacity(tokens) * part.token_nbytes} for part in plan.uncompressed
        ],
        "cache": predict_stats(plan, tokens).to_dict(),
        "eviction": eviction,
        **({} if plan.allocation is None else {"allocation": asdict(plan.allocation)}),
        "attention": backend.describe(),
        "thresholds": thresholds.table().origin,
    }
