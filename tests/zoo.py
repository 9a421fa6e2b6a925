"""Tiny random models of many mlx-lm architectures: `zoo.toml` describes them, and `build` makes one.

`test_zoo.py` and `contract/test_architectures.py` run every model and check its description.
"""

import tomllib
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path
from mlx_lm.utils import MODEL_REMAPPING


@dataclass(frozen=True, kw_only=True)
class Arch:
    """One architecture, and how the layers with a plain `KVCache` use it: the only ones that mlx_tq replaces."""

    name: str
    config: dict
    layers: str = "KK"  # a letter per cache entry: K KVCache, R RotatingKVCache, A ArraysCache, L CacheList of A and K
    dims: tuple[int, int] = (64, 64)  # key and value dim
    shared: int = 0  # later layers that attend, with cache=None, to the pair which an earlier layer fetched
    why: str = ""  # reason why mlx_tq cannot serve it
    note: str = ""  # about mlx-lm's source
    buildable: bool = True
    query_gain: float = 1.0  # on q_norm.weight, where the model has no 1/sqrt(dim) of its own

    @property
    def servable(self) -> bool:
        return not self.why

    @property
    def plain_layers(self) -> int:
        return self.layers.count("K") + self.layers.count("L")


def _architectures() -> dict[str, Arch]:
    zoo, architectures = tomllib.loads(Path(__file__).with_suffix(".toml").read_text()), {}
    for name, entry in zoo["models"].items():
        parts = [*(zoo["parts"][part] for part in entry.pop("parts", ["wide"])), entry.pop("config", {})]
        config = {"model_type": name} | {key: value for part in parts for key, value in part.items()}
        config = {key: None if value == "none" else value for key, value in config.items()}
        architectures[name] = Arch(name=name, config=config, **entry | {"dims": tuple(entry.get("dims", (64, 64)))})
    return architectures


ARCHITECTURES = _architectures()


def build(name: str, dtype: mx.Dtype = mx.float32, seed: int = 0) -> nn.Module:
    """Return the model with random weights, equal for equal seeds; raise ValueError if it cannot be built here."""
    arch = ARCHITECTURES[name]
    if not arch.buildable:
        raise ValueError(f"{name}: {arch.why}")
    model_type = arch.config["model_type"]
    module = import_module(f"mlx_lm.models.{MODEL_REMAPPING.get(model_type, model_type)}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(arch.config))

    def randomize(path: str, weight: mx.array) -> mx.array:
        """Add noise to weights that start constant (biases, sinks, norms), and give matrices a gain of one."""
        if mx.all(weight == weight.flatten()[0]):
            weight = weight + 0.2 * mx.random.normal(weight.shape)
        elif weight.ndim > 1 and "emb" not in path:
            weight = weight * 3**0.5
        return weight * arch.query_gain if path.endswith("q_norm.weight") else weight

    model.update(tree_map_with_path(randomize, model.parameters()))
    model.set_dtype(dtype)
    model.eval()
    mx.eval(model.parameters())
    return model
