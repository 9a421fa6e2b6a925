"""Divide a model among ranks by its heads, as mlx-lm does: each rank computes some of them, and sums join the parts."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_tq.distributed.group import ALONE, Ranks
from mlx_tq.errors import ConfigError, UnsupportedModelError
from mlx_tq.models.fingerprint import WHOLE, fingerprint
from mlx_tq.models.gguf import make_config
from mlx_tq.models.gguf_file import read_gguf

_RANKS = "_mlx_tq_ranks"  # the attribute of a rank's part of a model


def ranks_of(model: Any) -> Ranks:
    """Return the ranks among which a model is divided, or this process alone."""
    ranks: Ranks = getattr(model, _RANKS, ALONE)
    return ranks


def check_heads(source: str, ranks: Ranks) -> None:
    """Raise ConfigError, before weights are read, if `ranks` do not divide the model's KV heads."""
    config = _read_config(source)
    config = {**config, **config.get("text_config", {})}
    heads = config.get("num_key_value_heads") or config.get("num_attention_heads")
    if heads and heads % ranks.size:
        valid = [str(count) for count in range(1, heads + 1) if heads % count == 0]
        raise ConfigError(
            f"{Path(source).name} ({config.get('model_type')}) has {heads} KV heads, which {ranks.size} ranks do not "
            f"divide. Start {' or '.join(valid)} with mlx.launch -n."
        )


def _read_config(source: str) -> dict[str, Any]:
    """Return the configuration of a model, or {} if loading the model will report what is wrong."""
    path = Path(source)
    if path.is_file():
        return make_config(read_gguf(path))
    try:
        if not path.is_dir():
            from huggingface_hub import hf_hub_download  # takes 0.1 s to import

            path = Path(hf_hub_download(source, "config.json")).parent
        config: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config


def divide(model: Any, ranks: Ranks) -> None:
    """Reduce a model, whose weights may not be read yet, to this rank's part, and read that."""
    name = model.model_type
    if not hasattr(model, "shard"):
        by_layers = hasattr(getattr(model, "model", None), "pipeline")
        reason = "divides it only by layers, which mlx_tq does not" if by_layers else "does not divide it"
        raise UnsupportedModelError(f"{name} cannot run on {ranks.size} ranks: mlx-lm {reason}. Start one.")
    setattr(model, WHOLE, whole := fingerprint(model))
    ranks.check_equal("the model", np.frombuffer(whole.encode(), np.uint8))
    try:
        model.shard(ranks.group)
    except ValueError as error:
        raise ConfigError(f"{name} cannot be divided among {ranks.size} ranks: {error}. Start fewer.") from error
    setattr(model, _RANKS, ranks)
    mx.eval(model.parameters())
