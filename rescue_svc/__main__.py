"""`python -m rescue_svc COMMAND` is `mlx-tq-rescue COMMAND`."""

import sys

from rescue_svc.cli import main

if __name__ == "__main__":
    sys.exit(main())
