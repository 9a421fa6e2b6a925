"""Divide a model among ranks by its heads, as mlx-lm does: each rank computes some of them, and sums join the parts."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_tq.distributed.group import Ranks
from mlx_tq.errors import ConfigError, UnsupportedModelError
from mlx_tq.models.fingerprint import fingerprint
from mlx_tq.models.gguf.architectures import config_of
from mlx_tq.models.gguf.file import read_header
from mlx_tq.models.shard import Shard, mark


def check_heads(where: str, ranks: Ranks) -> None:
    """Raise, before a weight is read, where the KV heads of a model cannot be divided.

    Args:
        where: folder, hub name or GGUF file.
        ranks: to divide them among.

    Raises:
        ConfigError: they cannot, with the numbers that can.
    """
    config = _config(where)
    config = {**config, **config.get("text_config", {})}
    heads = config.get("num_key_value_heads") or config.get("num_attention_heads")
    if heads and heads % ranks.size:
        able = [str(count) for count in range(1, heads + 1) if heads % count == 0]
        raise ConfigError(
            f"{Path(where).name} ({config.get('model_type')}) has {heads} KV heads, which {ranks.size} ranks do not "
            f"divide. Start {' or '.join(able)} with mlx.launch -n."
        )


def _config(where: str) -> dict[str, Any]:
    """The configuration of a model, or nothing where loading it will say what is wrong."""
    path = Path(where)
    if path.is_file():
        return config_of(read_header(path))
    try:
        if not path.is_dir():
            from huggingface_hub import hf_hub_download  # 0.1 s

            path = Path(hf_hub_download(where, "config.json")).parent
        found: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def divide(model: Any, ranks: Ranks) -> None:
    """Leave of a model, whose weights may not be read yet, this rank's part, and read that.

    Raises:
        UnsupportedModelError: mlx-lm cannot divide the architecture.
        ConfigError: sizes that cannot be divided.
        RankError: ranks have different models.
    """
    name = model.model_type
    if not hasattr(model, "shard"):
        layers = hasattr(getattr(model, "model", None), "pipeline")
        why = "divides it only by layers, which mlx_tq does not" if layers else "does not divide it"
        raise UnsupportedModelError(f"{name} cannot run on {ranks.size} ranks: mlx-lm {why}. Start one.")
    whole = fingerprint(model)
    ranks.check("the model", np.frombuffer(whole.encode(), np.uint8))
    try:
        model.shard(ranks.group)
    except ValueError as error:
        raise ConfigError(f"{name} cannot be divided among {ranks.size} ranks: {error}. Start fewer.") from error
    mark(model, Shard(ranks, whole))
    mx.eval(model.parameters())
