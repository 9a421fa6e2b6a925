"""`mlx_tq.evaluate` with trellis formats too: `tcq4`, `tcq3`, `tcq2`, and `tcq3.6` whose window has 6 bits.

python -m benchmarks.trellis.evaluate divergence --profiles tq3/tq3,tcq3/tcq3 [--model M --text FILE]
"""

import sys

from benchmarks.trellis.formats import TrellisFormat
from mlx_tq.codec import formats
from mlx_tq.evaluate import main as evaluate


def main() -> int:
    """The exit code of the command."""
    formats._registry.cache_clear()  # the configuration was imported before the formats
    assert TrellisFormat.variants()[0].name in formats.format_names()
    return evaluate()


if __name__ == "__main__":
    sys.exit(main())
