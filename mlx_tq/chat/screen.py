"""What a chat shows beside the answers, on stderr."""

from mlx_tq.cli.args import SHADOW
from mlx_tq.cli.foreign_text import readable
from mlx_tq.cli.memory_bar import memory_bar
from mlx_tq.cli.screen import console, human_bytes, results, show_plan, show_quoted, show_recalled, table
from mlx_tq.session import Session, SessionStats

_SHOWN_TOKENS = 32768  # context at which the bytes of a model without a limit are shown


def show_banner(session: Session) -> None:
    """Print how the conversation's cache is stored, what leaves it, and what brings that back."""
    if session.plan is not None:
        beside = None if session.shadow is None else SHADOW.flag
        show_plan(session.plan, session.positions or _SHOWN_TOKENS, beside)
    if session.client is not None:
        console.print(f"rescue: {session.rescue.service}", style="dim", markup=False)


def show_last_exchange(session: Session) -> None:
    """Print the last question of a loaded conversation and its answer, whole."""
    if session.last_exchange is not None:
        question, answer = map(readable, session.last_exchange)
        console.print(f"> {question}\n{answer}", markup=False, soft_wrap=True)


def show_memory(stats: SessionStats) -> None:
    """Print the bar of live, evicted and rescued tokens."""
    console.print(memory_bar(stats), soft_wrap=True)


def show_turn(session: Session) -> None:
    """Say what came back, and how fast the answer was."""
    turn = session.turns[-1]
    if turn.archived:
        show_recalled(turn.recalled, turn.by_meaning, turn.archived, turn.recall_seconds)
    show_quoted(turn.rehydration, turn.rescue_seconds)
    said = f"{turn.prompt_tokens:,} tokens read, {turn.generation_tokens:,} said at {turn.generation_tps:.1f} tok/s"
    console.print(f"{said} ({turn.finish_reason})", style="dim")


def show_stats(session: Session) -> None:
    """Print a table of what the conversation takes; to stdout, as it was asked for."""
    stats = session.stats
    shown = table("", "conversation", readable(session.session_id[:8]))
    size = f"{human_bytes(stats.nbytes)}, fp16 {human_bytes(stats.fp16_nbytes)}"
    if stats.nbytes < stats.fp16_nbytes:  # else its buffers are larger than so short a conversation
        size += f" ({stats.fp16_nbytes / stats.nbytes:.1f}x)"
    rows = {
        "turns": f"{stats.turns:,}",
        "tokens": f"{stats.tokens:,}" + (f" of {stats.positions:,}" if stats.positions else ""),
        "live in the cache": f"{stats.live:,}",
        "evicted": f"{stats.evicted:,}",
        "of these on disk": f"{stats.tiers.cold:,} in {human_bytes(stats.tiers.cold_nbytes)}",
        "in no tier": f"{stats.tiers.recompute:,}",
        **({"recalled last": f"{stats.recalled:,}"} if stats.tiers.cold else {}),
        "rescued": f"{stats.rescued:,}",
        "KV cache": size,
    }
    if stats.rescue is not None:
        rescue = stats.rescue
        lost = rescue.dropped + rescue.refused
        rows["spans at the service"] = f"{rescue.written:,} written, {rescue.queued:,} waiting, {lost:,} lost"
        rows["questions to it"] = f"{rescue.queries:,} asked, {rescue.unanswered:,} unanswered"
    for name, value in rows.items():
        shown.add_row(name, value)
    results.print(shown)
