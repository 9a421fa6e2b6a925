"""The commands of `mlx-tq-rescue`: functions that take the settings and the command's own arguments."""
