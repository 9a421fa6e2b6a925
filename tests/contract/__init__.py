"""What mlx-lm and mlx_tq promise one another, checked on whole models."""
