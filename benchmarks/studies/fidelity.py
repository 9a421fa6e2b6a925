"""Measure formats by the protocol of mlx-quant-fidelity, and the affine codes of mlx-lm's quantized cache with them.

    python -m benchmarks.studies.fidelity [flags of `mlx_tq.evaluate divergence`]

Everything is packed: there are no sink tokens and no window. Each piece of the text has 512 tokens.
"""

import sys

from benchmarks.quality.frontier import FORMATS
from mlx_tq.codec import register_format
from mlx_tq.evaluate import build_parser, run

PROFILES = "q8/q8,tq4/tq4,tq3/tq3,tcq3/tcq3,affine8_64:plain/affine8_64,affine4_64:plain/affine4_64"


def main() -> int:
    for each in FORMATS:
        register_format(each)
    words = ["divergence", "--protocol", "fidelity", "--profiles", PROFILES, *sys.argv[1:]]
    return run(build_parser().parse_args(words))


if __name__ == "__main__":
    sys.exit(main())
