"""Run `python -m mlx_tq.bench`."""

import sys

from mlx_tq.bench import main

if __name__ == "__main__":
    sys.exit(main())
