"""The commands of `mlx-tq-rescue`, one file each: its `run` takes the settings and the command's own arguments."""
