"""The bar that shows how full a session's context is."""

from rich.text import Text

from mlx_tq.cli.screen import human_bytes
from mlx_tq.session import Session

_WIDTH = 40  # characters


def memory_bar(session: Session) -> Text:
    """Draw the live and evicted tokens along the context, with counts and bytes."""
    stats = session.stats
    total = max(session.context_length or 0, stats.tokens, 1)
    live = round(_WIDTH * stats.live / total)
    evicted = min(round(_WIDTH * stats.evicted / total), _WIDTH - live)
    bar = Text()
    for sign, style, width in (("█", "green", live), ("▒", "yellow", evicted), ("·", "dim", _WIDTH - live - evicted)):
        bar.append(sign * width, style)
    bar.append(f" {stats.live:,} live", "green")
    bar.append(f"  {stats.evicted:,} evicted", "yellow")
    if stats.archived:
        bar.append(f"  {stats.archived:,} archived  {session.recalled_tokens:,} recalled", "cyan")
    bar.append(f"  {session.quoted_tokens:,} rescued", "cyan")
    bar.append(f"  {human_bytes(stats.nbytes)}, fp16 {human_bytes(stats.fp16_nbytes)}", "dim")
    return bar
