"""A conversation's cache as a bar, which chat and demo show."""

from rich.text import Text

from mlx_tq.cli.screen import human_bytes
from mlx_tq.session import SessionStats

_BAR = 40  # characters
_LIVE, _EVICTED, _FREE = ("█", "green"), ("▒", "yellow"), ("·", "dim")


def memory_bar(stats: SessionStats) -> Text:
    """Tokens in the cache and out of it, along the model's positions, and the bytes."""
    total = max(stats.positions or 0, stats.tokens, 1)
    live = round(_BAR * stats.live / total)
    evicted = min(round(_BAR * stats.evicted / total), _BAR - live)
    bar = Text()
    for (sign, style), count in ((_LIVE, live), (_EVICTED, evicted), (_FREE, _BAR - live - evicted)):
        bar.append(sign * count, style)
    bar.append(f" {stats.live:,} live", "green")
    bar.append(f"  {stats.evicted:,} evicted", "yellow")
    if stats.tiers.cold:
        bar.append(f"  {stats.tiers.cold:,} archived  {stats.recalled:,} recalled", "cyan")
    bar.append(f"  {stats.rescued:,} rescued", "cyan")
    bar.append(f"  {human_bytes(stats.nbytes)}, fp16 {human_bytes(stats.fp16_nbytes)}", "dim")
    return bar
