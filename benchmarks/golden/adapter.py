"""Everything of mlx_tq that golden runs call by name: the one file to change where a name does.

Options of eviction are called there as they were when before.json was recorded. `then` stands for the defaults of that
day: plain keys, statistics of the text that is read, the dims that RoPE leaves alone counted, and nothing recalled.
"""

import shutil
from contextlib import AbstractContextManager
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
from cases import Options

from mlx_tq.codec.formats import format_names, get_format
from mlx_tq.commands import screen
from mlx_tq.commands.needles.haystack import load_text
from mlx_tq.config import KVConfig
from mlx_tq.models import embedded_path, load
from mlx_tq.policies import EvictConfig, parse_policy
from mlx_tq.sequence.build import build_caches
from mlx_tq.sequence.compressed import compressed, plan_caches
from mlx_tq.sequence.passes import compressed_caches, sequence_in

# What options were called when before.json was recorded.
_RENAMED = {"nope": "score_unrotated_dims", "wide_scale": "fp32_scales"}
_CONDITIONS = ("generate", "chat", "server", "cache_prompt", "evaluate")  # commands with the flag
_RECALLS = ("generate", "chat", "server", "cache_prompt")  # likewise
_CALIBRATES = ("triattention", "expected_attention")

# What lines begin with that were added since: there is nothing to compare them with.
SAID_SINCE = ("tiers: ", "of these on disk", "in no tier")


def text() -> str:
    """The excerpt of WikiText-2 inside the package."""
    return load_text()


def embedded() -> Any:
    """The model inside the package, in float32: greedy choices then do not hang on rounding."""
    return load(dtype="float32")[0]


def wide_model(folder: Path) -> None:
    """Write the model inside the package to a folder, in float32."""
    shutil.copytree(embedded_path(), folder)
    weights = mx.load(str(folder / "model.safetensors"))
    wide = {name: weight.astype(mx.float32) for name, weight in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), wide)


def formats() -> dict[str, bool]:
    """The name of each storage format, and whether values can have it."""
    return {name: not get_format(name).keys_only for name in format_names()}


_SINGLY: Options = {"granularity": "1"}  # the default of that day


def _policy(options: Options, then: bool) -> str:
    """The policy and its options as --kv-evict takes them."""
    own = {_RENAMED.get(name, name): value for name, value in options.items() if name not in ("policy", "budget")}
    name = options["policy"]
    if name not in _CALIBRATES:
        own.pop("warmup", None)  # which such a policy had, and did not read
    if own.get("aggregation") == "expected_attention":
        name = own.pop("aggregation")
    if name == "triattention" and then:
        own = {"score_unrotated_dims": True, "aggregation": "paper", **own}
    texts = [f"{key}={ {True: 'on', False: 'off'}.get(value, value) }".replace(" ", "") for key, value in own.items()]
    return ":".join([name, *texts])


def evict_flags(options: Options, then: bool) -> list[str]:
    """The flags that say what `config` takes as `evict`."""
    if not options:
        return []
    rest = (_SINGLY if then else {}) | {name: value for name, value in options.items() if name != "stats"}
    budget = ["--kv-budget", str(options["budget"])] if "budget" in options else []
    stats = options.get("stats", "text" if then and options.get("policy") in _CALIBRATES else None)
    return ["--kv-evict", _policy(rest, then), *budget, *(["--kv-stats", stats] if stats else [])]


def swept(then: bool) -> str:
    """The policies of `evaluate sweep`: TriAttention with options, and one without."""
    options = [{}, {"mode": "v1", "evict": "highest", "nope": False}, {"aggregation": "v3"}, {"policy": "knorm"}]
    stats = ":stats=text" if then else ""
    texts = (_policy({"policy": "triattention", **each}, then) for each in options)
    return ",".join(text + (stats if text.startswith("tri") else "") for text in texts)


def flags_then(words: list[str]) -> list[str]:
    """What a command line needs for the other defaults of that day; a file's own configuration is not named again."""
    goes_on = words[0] == "generate" and "--prompt-cache-file" in words
    recalls = words[0] in _RECALLS and "--kv-evict" in words
    condition = ["--kv-condition", "off"] if words[0] in _CONDITIONS and not goes_on else []
    return [*condition, *(["--kv-recall", "off"] if recalls else [])]


def config(then: bool, evict: Options | None = None, **changes: Any) -> KVConfig:
    """A configuration; `evict` has the options of eviction, among them its policy and budget."""
    changes = {_RENAMED.get(name, name): value for name, value in changes.items()}
    if then:
        changes["condition"] = False
    if evict is None:
        return KVConfig(**changes)
    policy = parse_policy(_policy((_SINGLY if then else {}) | evict, then), **({"stats": "text"} if then else {}))
    return KVConfig(**changes, evict=EvictConfig(policy, evict.get("budget", "90%"), "off"))  # nothing is asked


def serving(model: Any, chosen: KVConfig | None = None) -> AbstractContextManager[None]:
    """The context in which a model runs on compressed caches, which mlx-lm makes where `chosen` says how."""
    return compressed(model, chosen)


class Storage:
    """How a model's caches are stored under a configuration; decided once, for any number of caches."""

    def __init__(self, model: Any, chosen: KVConfig) -> None:
        self._plan = plan_caches(model, chosen)

    def caches(self) -> list[Any]:
        """A fresh prompt cache."""
        return build_caches(self._plan)

    def text(self, tokens: int) -> str:
        """The plan, as commands show it."""
        with screen.console.capture() as shown:
            screen.show_plan(self._plan, tokens)
        return "\n".join(line for line in shown.get().splitlines() if not line.startswith(SAID_SINCE))

    def nbytes(self, tokens: int) -> tuple[int, int]:
        """What the plan says of the compressed layers, and of the same layers in the model's type."""
        return self._plan.nbytes(tokens), self._plan.fp16_nbytes(tokens)


def contents(caches: list[Any]) -> dict[str, Any]:
    """What a prompt cache holds: bytes, tokens, and the positions of those that are live, as ranges."""
    layers = compressed_caches(caches)
    found = {
        "nbytes": sum(cache.nbytes for cache in caches),
        "compressed": ", ".join(f"{len(list(g))} x {size}" for size, g in groupby(c.nbytes for c in layers)),
        "packed": sorted({cache.body_tokens for cache in layers}),
        "seen": sorted({int(cache.offset) for cache in layers}),
        "stored": sorted({cache.size() for cache in layers}),
    }
    sequence = sequence_in(caches)
    if sequence is not None:
        found["live"] = sorted({_ranges(layer.positions.tolist()) for layer in layers})
        found["evicted"] = [f"{sequence.stats.tokens} in {sequence.stats.rounds} rounds"]
    return found


def _ranges(positions: list[int]) -> str:
    """Ascending numbers as in 0-7,9,12-20."""
    starts = [b for a, b in pairwise([-2, *positions]) if b != a + 1]
    stops = [a for a, b in pairwise([*positions, -1]) if b != a + 1]
    return ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in zip(starts, stops, strict=True))
