"""Imports transformers as if there were no PyTorch: mlx-lm needs its tokenizers only.

Otherwise each command would import PyTorch where it is installed, which takes longer than all else that it imports.
Only commands do this: an import must not change the process of a program.
"""

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import cast

_TORCH = "torch"


def import_transformers() -> None:
    """Let transformers find out, once for this process, that PyTorch is not there; later imports of PyTorch work."""
    if _TORCH in sys.modules or find_spec(_TORCH) is None:
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # as mlx-lm: it would ask for PyTorch
    sys.modules[_TORCH] = cast(ModuleType, None)  # as the documentation of sys.modules prevents an import
    try:
        import_module("transformers").is_torch_available()
    finally:
        del sys.modules[_TORCH]
