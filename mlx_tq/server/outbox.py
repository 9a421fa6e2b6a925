"""`Outbox`: events of the engine's thread on their way to the web side, a step's together."""

import asyncio

from mlx_tq.server.jobs import Event, Job, Left

Sent = tuple[Job, Event | Left]


class Outbox:
    """What has not been sent yet.

    Attributes:
        loop: on which events are delivered; None where nobody hears of them.
    """

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._waiting: list[Sent] = []

    def put(self, *sent: Sent) -> None:
        """Send these with the next ones."""
        self._waiting += sent

    def send(self) -> None:
        """Deliver all of them."""
        events, self._waiting = self._waiting, []
        if events and self.loop is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(_deliver, events)


def _deliver(events: list[Sent]) -> None:
    for job, event in events:
        if isinstance(event, Left):
            job.left.put_nowait(event)
        else:
            job.events.put_nowait(event)
