"""What `mlx_tq` and `rescue_svc` share: limits of connections, bodies and log lines; the rescue service's socket."""
