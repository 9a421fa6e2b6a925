"""The rescue service as mlx_tq sees it: text of evicted tokens goes there and is found again, as JSON on the wire."""

from mlx_tq.rescue.client import RescueClient, RescueStats
from mlx_tq.rescue.service import AUTO, OFF, open_service
from mlx_tq.rescue.wire import MAX_TEXT, Embedded, Found, TextSpan

__all__ = ["AUTO", "MAX_TEXT", "OFF", "Embedded", "Found", "RescueClient", "RescueStats", "TextSpan", "open_service"]
