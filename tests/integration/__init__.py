"""Tests of the door to mlx-lm."""
