"""What a chat shows beside the answers, on stderr."""

from rich.text import Text

from mlx_tq.session import Session, SessionStats
from mlx_tq.ui import console, human_bytes, results, table

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
    bar.append(f"  {stats.rescued:,} rescued", "cyan")
    bar.append(f"  {human_bytes(stats.nbytes)}, fp16 {human_bytes(stats.fp16_nbytes)}", "dim")
    return bar


def show_memory(stats: SessionStats) -> None:
    """Print the bar."""
    console.print(memory_bar(stats), soft_wrap=True)


def show_turn(session: Session) -> None:
    """Say what came back, and how fast the answer was."""
    turn = session.turns[-1]
    if turn.rehydration.ids:
        spans = ", ".join(f"{start:,}-{stop:,}" for start, stop in turn.rehydration.ranges)
        console.print(f"brought back: tokens {spans} ({turn.rescue_seconds * 1000:.0f} ms)", style="cyan")
    said = f"{turn.prompt_tokens:,} tokens read, {turn.generation_tokens:,} said at {turn.generation_tps:.1f} tok/s"
    console.print(f"{said} ({turn.finish_reason})", style="dim")


def show_stats(session: Session) -> None:
    """Print a table of what the conversation takes; to stdout, as it was asked for."""
    stats = session.stats
    shown = table("", "conversation", session.session_id[:8])
    size = f"{human_bytes(stats.nbytes)}, fp16 {human_bytes(stats.fp16_nbytes)}"
    if stats.nbytes < stats.fp16_nbytes:  # else its buffers are larger than so short a conversation
        size += f" ({stats.fp16_nbytes / stats.nbytes:.1f}x)"
    rows = {
        "turns": f"{stats.turns:,}",
        "tokens": f"{stats.tokens:,}" + (f" of {stats.positions:,}" if stats.positions else ""),
        "live in the cache": f"{stats.live:,}",
        "evicted": f"{stats.evicted:,}",
        "rescued": f"{stats.rescued:,}",
        "KV cache": size,
    }
    if stats.rescue is not None:
        rescue = stats.rescue
        lost = rescue.dropped + rescue.refused
        rows["spans at the service"] = f"{rescue.written:,} written, {rescue.queued:,} waiting, {lost:,} lost"
        rows["questions to it"] = f"{rescue.asked:,} asked, {rescue.unanswered:,} unanswered"
    for name, value in rows.items():
        shown.add_row(name, value)
    results.print(shown)
