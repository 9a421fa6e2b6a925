"""mlx_tq: a compressed KV cache for mlx-lm models."""
