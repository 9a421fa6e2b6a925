"""`python -m rescue_svc COMMAND`: as `mlx-tq-rescue`."""

import sys

from rescue_svc.cli import main

if __name__ == "__main__":
    sys.exit(main())
