"""Client of the rescue service, which stores the text of evicted tokens and retrieves it over HTTP."""

from mlx_tq.rescue.client import RescueClient, RescueStats, open_client
from mlx_tq.rescue.locator import AUTO, OFF, START_S, open_service
from mlx_tq.rescue.wire import MAX_TEXT, RetrievedSpan, TextSpan

__all__ = [
    "AUTO",
    "MAX_TEXT",
    "OFF",
    "START_S",
    "RescueClient",
    "RescueStats",
    "RetrievedSpan",
    "TextSpan",
    "open_client",
    "open_service",
]
