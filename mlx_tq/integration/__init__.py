"""The door to mlx-lm: its attention, its RoPE modules, its forward pass, and what is known of its models."""
