"""What `mlx_tq` and `rescue_svc` share: limits of connections, bodies and logs, the rescue socket, process checks."""
