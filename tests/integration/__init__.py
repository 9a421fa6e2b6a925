"""Tests of the patches into mlx-lm and of the model probe."""
