"""How a GGUF file says that positions are scaled, as mlx-lm's `rope_scaling`."""

import math
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_tq.errors import UnsupportedModelError
from mlx_tq.models.gguf.file import GgufFile, damaged
from mlx_tq.models.gguf.weights import read_tensor

# Llama 3.1 and later: what the wavelength of each pair of dims is multiplied by. The four numbers that made it are in
# no file; the first is the largest factor, the others are the same in all of Meta's models.
FREQUENCY_FACTORS = "rope_freqs.weight"
_LOW, _HIGH, _TRAINED = 1.0, 4.0, 8192
_KNOWN = {
    "none": (),
    "linear": ("factor",),
    "yarn": ("factor", "original_context_length"),
}
_HARMLESS = ("type", "finetuned")


def rope_scaling(file: GgufFile, config: dict[str, Any]) -> dict[str, Any] | None:
    """mlx-lm's `rope_scaling`, or None for a file without.

    Args:
        file: whose scaling it is.
        config: with `head_dim` and `rope_theta`.

    Raises:
        ConfigError: a number of the scaling is missing.
        UnsupportedModelError: a scaling that is not known here.
    """
    prefix = f"{file.metadata['general.architecture']}.rope.scaling."
    said = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    kind = said.get("type", "none")
    if kind not in _KNOWN or (FREQUENCY_FACTORS in file.tensors and kind != "none"):
        raise _unknown(file, f"RoPE scaling {str(kind)[:40]!r}", f"{', '.join(_KNOWN)} and llama3")
    wanted = _KNOWN[kind]
    if foreign := said.keys() - {*wanted, *_HARMLESS}:
        raise _unknown(file, f"{prefix}{min(foreign)} with RoPE scaling {kind!r}", f"{', '.join(wanted) or 'none'}")
    if missing := [key for key in wanted if not isinstance(said.get(key), int | float)]:
        raise damaged(file.path, f"it has no {prefix}{missing[0]}")
    if kind == "yarn":
        return {"type": kind, "factor": said["factor"], "original_max_position_embeddings": said[wanted[1]]}
    if kind == "linear":
        return {"type": kind, "factor": said["factor"]}
    return _llama3(file, config) if FREQUENCY_FACTORS in file.tensors else None


def _llama3(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """The scaling whose factors are those of the file."""
    factors = np.array(read_tensor(file, file.tensors[FREQUENCY_FACTORS], mx.float32)["weight"], dtype=np.float64)
    exponents = np.arange(0, config["head_dim"], 2) / config["head_dim"]
    turns = _TRAINED / (2 * math.pi * config["rope_theta"] ** exponents)  # of each pair over the trained context
    kept = np.clip((turns - _LOW) / (_HIGH - _LOW), 0, 1)
    largest = float(factors.max())
    if factors.shape != kept.shape or not np.allclose(factors, 1 / ((1 - kept) / largest + kept), rtol=1e-3):
        raise _unknown(file, f"factors in {FREQUENCY_FACTORS}", "those of Llama 3.1 to 3.3")
    return {
        "rope_type": "llama3",
        "factor": largest,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _TRAINED,
    }


def _unknown(file: GgufFile, what: str, valid: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"the model {str(file.path)!r} has an unknown {what}; valid are {valid}.")
