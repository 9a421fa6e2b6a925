"""Tiny random models of all architecture files of mlx-lm: `zoo.toml` describes them, and `build` makes one.

`test_zoo.py` and `contract/test_architectures.py` run every model and check its description.
"""

import re
import tomllib
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import plain_kernels
from mlx.utils import tree_map_with_path
from mlx_lm.models.cache import CacheList
from mlx_lm.utils import MODEL_REMAPPING

# A letter for each class of cache; the parts of a CacheList are in parentheses.
LETTERS = {"KVCache": "K", "RotatingKVCache": "R", "ArraysCache": "A", "ChunkedKVCache": "C", "LayerCache": "Y"}


@dataclass(frozen=True, kw_only=True)
class Arch:
    """One architecture, and how the layers with a plain `KVCache` use it: the only ones that mlx_tq replaces."""

    name: str
    config: dict
    layers: str = "KK"  # of `LETTERS`, for each cache
    dims: tuple[int, int] = (64, 64)  # key and value dim
    shared: int = 0  # later layers that attend, with cache=None, to the pair which an earlier layer fetched
    uncompressed_part: int | None = None  # of each CacheList, that stays mlx-lm's own
    why: str = ""  # reason why mlx_tq cannot serve it
    note: str = ""  # about mlx-lm's source
    buildable: bool = True
    query_gain: float = 1.0  # on q_norm.weight, where the model has no 1/sqrt(dim) of its own

    @property
    def servable(self) -> bool:
        return not self.why

    @property
    def plain_layers(self) -> int:
        return "".join(self.caches).count("K")

    @property
    def file(self) -> str:
        model_type = self.config["model_type"]
        return MODEL_REMAPPING.get(model_type, model_type)

    @property
    def caches(self) -> list[str]:
        """Letters of each cache, in mlx-lm's list of them; a small one stays mlx-lm's own."""
        caches = re.findall(r"\(\w+\)|\w", self.layers)
        if self.uncompressed_part is None:
            return caches
        place = self.uncompressed_part + 1
        return [letters[:place] + letters[place : place + 1].lower() + letters[place + 1 :] for letters in caches]

    def resized(self, **changes) -> dict:
        """Return the configuration with changes, also to what it nests."""
        text = self.config.get("text_config")
        return {**self.config, **changes} | ({"text_config": {**text, **changes}} if text else {})


def _architectures() -> dict[str, Arch]:
    zoo, architectures = tomllib.loads(Path(__file__).with_suffix(".toml").read_text()), {}
    for name, entry in zoo["models"].items():
        parts = [*(zoo["parts"][part] for part in entry.pop("parts", ["wide"])), entry.pop("config", {})]
        config = {"model_type": name} | {key: value for part in parts for key, value in part.items()}
        config = {key: None if value == "none" else value for key, value in config.items()}
        if text := entry.pop("text", None):  # a model type: the configuration is nested
            config["text_config"] = {**config, "model_type": text}
        architectures[name] = Arch(name=name, config=config, **entry | {"dims": tuple(entry.get("dims", (64, 64)))})
    return architectures


ARCHITECTURES = _architectures()


def architecture_files() -> list[str]:
    """Return the names of all architecture files of the installed mlx-lm."""
    files = sorted(path for path in (Path(mlx_lm.__path__[0]) / "models").glob("*.py"))
    defines = re.compile(r"^class ModelArgs\b", re.MULTILINE)
    return [path.stem for path in files if defines.search(path.read_text(encoding="utf-8"))]


def cache_letters(cache) -> str:
    if isinstance(cache, CacheList):
        return f"({''.join(map(cache_letters, cache.caches))})"
    return LETTERS[type(cache).__name__]


def build(name: str, dtype: mx.Dtype = mx.float32, seed: int = 0, *, spread: bool = True, **changes) -> nn.Module:
    """Return the model with random weights, equal for equal seeds; raise ValueError if it cannot be built here.

    With `spread`, weights are such that the logits depend on all of the context; else they are as mlx-lm makes them.
    `changes` are of the configuration.
    """
    arch = ARCHITECTURES[name]
    if not arch.buildable:
        raise ValueError(f"{name}: {arch.why}")
    plain_kernels.install()
    module = import_module(f"mlx_lm.models.{arch.file}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(arch.resized(**changes)))

    def randomize(path: str, weight: mx.array) -> mx.array:
        """Add noise to weights that start constant (biases, sinks, norms), and give matrices a gain of one."""
        if weight.dtype == mx.uint8:  # four ternary weights
            return sum(mx.random.randint(0, 3, weight.shape) << (2 * i) for i in range(4)).astype(mx.uint8)
        if path.endswith("weight_scale"):
            return 0.1 * weight
        if not mx.issubdtype(weight.dtype, mx.floating):
            return weight
        if spread and mx.all(weight == weight.flatten()[0]):
            weight = weight + 0.2 * mx.random.normal(weight.shape)
        elif spread and weight.ndim > 1 and "emb" not in path:
            weight = weight * 3**0.5
        return weight * arch.query_gain if path.endswith("q_norm.weight") else weight

    model.update(tree_map_with_path(randomize, model.parameters()))
    model.set_dtype(dtype)
    model.eval()
    mx.eval(model.parameters())
    return model
