"""Run `python -m mlx_tq.evaluate`."""

import sys

from mlx_tq.evaluate import main

if __name__ == "__main__":
    sys.exit(main())
