"""Limits of HTTP connections, request bodies and log lines, for `mlx_tq.server` and `rescue_svc`."""
