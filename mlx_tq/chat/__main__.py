"""`python -m mlx_tq.chat`."""

import sys

from mlx_tq.chat import main

if __name__ == "__main__":
    sys.exit(main())
