"""SmolLM2-135M-Instruct, where `make smollm2` installed it."""

import pytest

from mlx_tq.errors import ConfigError
from mlx_tq.models.load import smollm2_path

try:
    PATH, WHY = smollm2_path(), ""
except ConfigError as error:
    PATH, WHY = None, str(error)
needs_smollm2 = pytest.mark.skipif(PATH is None, reason=WHY)
