"""`python -m mlx_tq.server`."""

import sys

from mlx_tq.server import main

if __name__ == "__main__":
    sys.exit(main())
