"""The work of the commands that are one file: `mlx_tq/NAME.py` has the flags of runs/NAME.py, and loads no mlx."""
