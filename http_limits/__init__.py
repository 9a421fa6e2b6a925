"""Limits of HTTP connections and of log lines, for `mlx_tq.server` and `rescue_svc`; imports neither of them."""
