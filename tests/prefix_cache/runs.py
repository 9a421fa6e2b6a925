"""Runs a prompt with a prefix cache or without one, here or in a process of its own."""

import hashlib
import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from zoo import build

from mlx_tq.cache.recurrent_states import StateStorage
from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.models import load
from mlx_tq.prefix_cache.folder import Folder
from mlx_tq.prefix_cache.prefix_cache import PrefixCache, reuse_prefix
from mlx_tq.prompt_cache.build import build_caches
from mlx_tq.prompt_cache.capacity import with_trimmed_windows
from mlx_tq.prompt_cache.compressed import compressed_attention, plan_caches

STEP, LENGTH = 200, 560
EACH_STEP = StateStorage(step=STEP)
SMALL = KVConfig(key="q8", value="tq4", sinks=16, window=32)
EVICTS = KVConfig(
    key="q8", sinks=16, window=32, evict=EvictConfig("triattention:warmup=64:trigger=16:granularity=1", 300, "off")
)
# A plain model, sliding windows, a hybrid, two whose layers have two caches each, and one that evicts on the way.
CASES = {
    "llama": ("llama", SMALL),
    "embedded": ("embedded", SMALL),
    "gemma3_text": ("gemma3_text", SMALL),
    "qwen3_next": ("qwen3_next", SMALL),
    "falcon_h1": ("falcon_h1", SMALL),
    "minimax_m3_vl": ("minimax_m3_vl", SMALL),
    "evicts": ("embedded", EVICTS),
}


def load_model(name):
    if name != "embedded":
        return build(name)
    model, _ = load()
    model.set_dtype(mx.float32)
    return model


def random_tokens(count, seed=3):
    return np.random.default_rng(seed).integers(5, 150, count).tolist()


def digest(caches):
    """Return a digest of what the next token may see, without the seconds that eviction rounds took."""
    hashed = hashlib.sha256()
    for name, leaf in tree_flatten([with_trimmed_windows(cache).state for cache in caches]):
        if isinstance(leaf, mx.array):
            hashed.update(f"{name} {leaf.dtype} {leaf.shape}".encode() + np.array(leaf.flatten().view(mx.uint8)).data)
            continue
        if isinstance(leaf, str) and leaf.startswith("{"):
            leaf = {key: value for key, value in json.loads(leaf).items() if key != "stats"}
        hashed.update(f"{name} {leaf}".encode())
    return hashed.hexdigest()


def run_prompt(model, config, ids, folder=None, states=EACH_STEP, max_tokens=8):
    """Return the tokens restored, those of the answer, and digests of the caches before and after the answer."""
    plan = plan_caches(model, config)
    caches = build_caches(plan)
    prefix_cache = PrefixCache(model, plan, Folder(Path(folder)), print, states=states) if folder else None
    before = []
    with compressed_attention(model), reuse_prefix(prefix_cache, caches, ids[:-1]) as prefix:

        def progress(processed, total):
            prefix.note(processed + prefix.restored)
            if processed == total - 1:
                before.append(digest(caches))

        rest = mx.array(ids[prefix.restored :])
        options = {"prompt_cache": caches, "prefill_step_size": STEP, "prompt_progress_callback": progress}
        answer = [token for token, _ in generate_step(rest, model, max_tokens=max_tokens, **options)]
    return {"restored": prefix.restored, "answer": answer, "before": before, "after": digest(caches)}


def main(folder, *names):
    """Run one prompt for each case and print the results."""
    results = {}
    for name in names:
        model_name, config = CASES[name]
        results[name] = run_prompt(load_model(model_name), config, random_tokens(LENGTH), folder)
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
