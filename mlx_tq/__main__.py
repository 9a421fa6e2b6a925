"""`python -m mlx_tq COMMAND`."""

import sys

from mlx_tq.cli import main

if __name__ == "__main__":
    sys.exit(main())
