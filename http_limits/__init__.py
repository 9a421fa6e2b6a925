"""Shared by `mlx_tq` and `rescue_svc`: limits of connections, bodies and logs, the rescue socket, process checks."""
