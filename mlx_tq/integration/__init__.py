"""Patches into mlx-lm (attention, RoPE, forward pass, cache factory), and the probe of its models."""
