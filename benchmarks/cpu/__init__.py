"""Programs that measure a CPU. They use the BLAS that the commands of mlx_tq use, which must be loaded before mlx."""

from mlx_tq.cli.fast_blas import use_fast_blas

use_fast_blas()
