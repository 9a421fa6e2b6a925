"""A prompt read and answered with a store or without one, here or in a process of its own."""

import hashlib
import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from zoo import build

from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.models import load
from mlx_tq.prefix_cache.folder import Folder
from mlx_tq.prefix_cache.store import PrefixCache, reading
from mlx_tq.prompt_cache.build import build_caches
from mlx_tq.prompt_cache.compressed import compressed, plan_caches

STEP, LENGTH = 200, 560
SMALL = KVConfig(key="q8", value="tq4", sinks=16, window=32)
EVICTS = KVConfig(
    key="q8", sinks=16, window=32, evict=EvictConfig("triattention:warmup=64:trigger=16:granularity=1", 300, "off")
)
# A plain model, sliding windows, a hybrid, one whose layers have two caches each, and one that evicts on the way.
CASES = {
    "embedded": ("embedded", SMALL),
    "gemma3_text": ("gemma3_text", SMALL),
    "qwen3_next": ("qwen3_next", SMALL),
    "falcon_h1": ("falcon_h1", SMALL),
    "evicts": ("embedded", EVICTS),
}


def model_of(name, seed=0):
    if name != "embedded":
        return build(name, seed=seed)
    model, _ = load()
    model.set_dtype(mx.float32)
    return model


def tokens(count, seed=3):
    return np.random.default_rng(seed).integers(5, 150, count).tolist()


def bits(caches):
    """A digest of all that caches hold, but for the seconds that rounds took."""
    digest = hashlib.sha256()
    for name, leaf in tree_flatten([cache.state for cache in caches]):
        if isinstance(leaf, str) and leaf.startswith("{"):
            leaf = {key: value for key, value in json.loads(leaf).items() if key != "stats"}
        digest.update(f"{name} {leaf}".encode() if not isinstance(leaf, mx.array) else name.encode())
        if isinstance(leaf, mx.array):
            digest.update(f"{leaf.dtype} {leaf.shape}".encode() + np.array(leaf.flatten().view(mx.uint8)).tobytes())
    return digest.hexdigest()


def answer(model, config, ids, folder=None, step=STEP, most=8):
    """How many tokens the store had, those of the answer, and the bits of the caches before and after it."""
    plan = plan_caches(model, config)
    caches = build_caches(plan)
    store = PrefixCache(model, plan, Folder(Path(folder)), print) if folder else None
    before, said = [], []
    with compressed(model), reading(store, caches, ids[:-1], step) as prompt:

        def read(processed, total):
            prompt.note(processed + prompt.restored)
            if processed == total - 1:
                before.append(bits(caches))

        rest = mx.array(ids[prompt.restored :])
        for token, _ in generate_step(
            rest, model, max_tokens=most, prompt_cache=caches, prefill_step_size=step, prompt_progress_callback=read
        ):
            said.append(token)
    return {"restored": prompt.restored, "said": said, "before": before, "after": bits(caches)}


def main(folder, *names):
    """Answer one prompt for each case, and print what came of it."""
    found = {}
    for name in names:
        kind, config = CASES[name]
        found[name] = answer(model_of(kind), config, tokens(LENGTH), folder)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
