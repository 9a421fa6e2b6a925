"""The tables of `mlx_tq.evaluate`."""

from itertools import groupby

from mlx_tq.codec.formats.compared.spectral import COUNTS
from mlx_tq.evaluate.arms import OFF
from mlx_tq.evaluate.divergence import Divergence
from mlx_tq.evaluate.drift import DriftRow
from mlx_tq.evaluate.formats import FormatRow
from mlx_tq.evaluate.layers import LayerRow, Predictions
from mlx_tq.evaluate.needle import VOID, Cell
from mlx_tq.evaluate.paired import Compared
from mlx_tq.evaluate.perplexity import Perplexity
from mlx_tq.evaluate.report import Results
from mlx_tq.evaluate.spectrum import PROFILES, SpectrumRow, schedules


def show_perplexity(results: Results, rows: list[Perplexity]) -> None:
    """PPL with its standard error, and its change against fp16 with its own."""
    lines = [
        (
            row.name,
            f"{row.ppl:.3f}",
            f"{row.ppl_error:.3f}",
            f"{row.delta:+.3f}",
            f"{row.delta_error:.3f}",
            f"{100 * row.packed:.0f}",
            f"{100 * row.kept:.0f}",
            f"{row.nbytes / 1e6:.1f}",
            f"{row.seconds:.1f}",
        )
        for row in rows
    ]
    columns = ("cache", "PPL", "+-", "change %", "+-", "packed %", "kept %", "MB", "s")
    results.show(f"Perplexity over {rows[0].tokens:,} tokens", columns, lines)


def show_divergence(results: Results, rows: list[Divergence]) -> None:
    """KL divergence and top-1 agreement."""
    lines = [
        (
            row.name,
            f"{row.kld:.6f}",
            f"{row.kld_error:.6f}",
            f"{row.kld_median:.6f}",
            f"{row.kld_99:.5f}",
            f"{row.top1:.2f}",
            f"{row.top1_error:.2f}",
            f"{100 * row.packed:.0f}",
        )
        for row in rows
    ]
    columns = ("cache", "KLD", "+-", "median", "99 %", "top-1 %", "+-", "packed %")
    results.show(f"Divergence from the fp16 cache over {rows[0].tokens:,} tokens, in nats", columns, lines)


def show_formats(results: Results, rows: list[FormatRow]) -> None:
    """Every pair, smallest first."""
    lines = [
        (
            row.name,
            f"{row.nbytes:,.0f}",
            f"{row.ratio:.2f}",
            f"{row.key_error:.5f}",
            f"{row.value_error:.5f}",
            f"{row.cosine:.5f}",
            f"{row.kld:.5f}",
            f"{row.kld_error:.5f}",
            f"{row.top1:.2f}",
            f"{row.ppl:.2f}",
            f"{row.delta:+.2f}",
            f"{row.delta_error:.2f}",
            f"{row.found}/{row.asked}" if row.asked else "-",
        )
        for row in rows
    ]
    columns = (
        "K/V",
        "B/token",
        "ratio",
        "K err",
        "V err",
        "cos",
        "KLD",
        "+-",
        "top-1 %",
        "PPL",
        "change %",
        "+-",
        "needles",
    )
    results.show(f"Pairs of formats; {100 * rows[0].packed:.0f} % of the attended tokens were packed", columns, lines)


def show_spectrum(results: Results, rows: list[SpectrumRow]) -> None:
    """Shares by layer, and the schedules."""
    lines = [(str(row.layer), *(f"{100 * share:.1f}" for share in row.shares.values())) for row in rows]
    note = "\n".join(f"{name} ({PROFILES[name]:.0%}): --kv-key {chosen}" for name, chosen in schedules(rows).items())
    columns = ("layer", *(f"{count} pairs %" for count in COUNTS))
    results.show("Energy of keys in their strongest RoPE pairs", columns, lines, note)


def show_needles(results: Results, cells: list[Cell]) -> None:
    """Passes of each arm by length and depth, without the void cells."""
    columns = list(dict.fromkeys((cell.tokens, cell.depth) for cell in cells))
    lines = []
    for name in dict.fromkeys(cell.name for cell in cells):
        counted = [[c for c in cells if c.name == name and (c.tokens, c.depth) == column] for column in columns]
        lines.append((name, *(_passes(group) for group in counted)))
    asked = [cell for cell in cells if cell.packed]
    whole = sum(cell.packed == cell.needle[1] - cell.needle[0] for cell in asked)
    void = sum(cell.verdict == VOID for cell in cells)
    others = sorted(cell.verdict for cell in cells if cell.verdict not in ("PASS", VOID))
    note = f"needle wholly in the packed body: {whole} of {len(asked)} answers from compressed caches; void: {void}"
    if others:
        note += "; not PASS: " + ", ".join(f"{name} {len(list(group))}" for name, group in groupby(others))
    results.show("Needles found", ("cache", *(f"{t} at {d:g}" for t, d in columns)), lines, note)


def _passes(cells: list[Cell]) -> str:
    counted = [cell for cell in cells if cell.verdict != VOID]
    return f"{sum(cell.verdict == 'PASS' for cell in counted)}/{len(counted)}"


def show_drift(results: Results, rows: list[DriftRow]) -> None:
    """What each step size changes."""
    lines = [
        (
            f"{row.name}, {row.step} at a time",
            "-" if row.first_layer is None else str(row.first_layer),
            "-" if row.later_layers is None else f"{row.later_layers:.1f}",
            f"{row.kld:.6f}",
            f"{row.logits:.5f}",
            f"{row.top1:.2f}",
        )
        for row in rows
    ]
    columns = ("cache", "first layer", "later layers %", "KLD", "logits", "top-1 %")
    results.show("Against reading the text at once: packed tokens with other codes, and predictions", columns, lines)


def show_layers(results: Results, against: str, found: list[tuple[list[LayerRow], Predictions]]) -> None:
    """Codes and hidden states by layer, then the predictions of each arm."""
    lines = [
        (
            f"{row.name}, layer {row.layer}",
            f"{row.cosine:.6f}",
            f"{row.least:.6f}",
            "-" if row.keys is None else f"{row.keys:.2f}",
            "-" if row.values is None else f"{row.values:.2f}",
            "-" if row.first is None else str(row.first),
        )
        for rows, _ in found
        for row in rows
    ]
    note = "\n".join(
        f"{each.name}: the same next token after {each.top1:.2f} % of {each.tokens} tokens, another first after "
        f"{'none' if each.first is None else f'position {each.first}'}; KLD {each.kld:.6f}"
        for _, each in found
    )
    columns = ("cache", "cosine", "least", "equal key codes %", "value codes %", "first other code")
    results.show(f"Layers against {against}: hidden states, codes of packed tokens", columns, lines, note)


def show_compared(results: Results, what: str, rows: list[Compared]) -> None:
    """Right answers of each cache, and those that changed against the fp16 cache on the same samples."""
    lines = [
        (
            row.group,
            row.name,
            f"{row.right}/{row.asked}",
            f"{100 * row.right / row.asked:.1f}",
            f"{100 * row.low:.1f}-{100 * row.high:.1f}",
            f"{100 * row.score:.1f}",
            "-" if row.name == OFF.name else str(row.lost),
            "-" if row.name == OFF.name else str(row.gained),
            "-" if row.name == OFF.name else f"{row.p:.3f}",
        )
        for row in rows
    ]
    columns = ("samples", "cache", "right", "%", "95 %", "score %", "lost", "gained", "p")
    note = "lost, gained: right on the fp16 cache alone, on this one alone; p: of such a difference by chance (McNemar)"
    results.show(f"Answers of {what}", columns, lines, note)
