"""The one type that all embedders share."""

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.float32]
