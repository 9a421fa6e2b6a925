"""The bar that moves while a long text is read, where stderr is a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from mlx_tq.cli.screen import console


class _Rate(ProgressColumn):
    """Tokens a second, once they are known."""

    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:,.0f} tok/s")


@contextmanager
def prefill_progress(*, what: str = "reading the prompt", show: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Tokens read, their rate and the time left under a title; yields mlx-lm's callback (processed, total)."""
    if not show or not console.is_terminal:
        yield lambda processed, total: None
        return
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=None)

        def advance(processed: int, total: int) -> None:
            progress.update(task, completed=processed, total=total)
            if processed >= total:
                progress.stop()

        yield advance
