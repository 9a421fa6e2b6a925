"""Study what recurrent states at 8 bits lose, in logits and greedy answers, restored once or at each turn.

    python -m benchmarks.studies.state_formats --model FOLDER --json state_formats_NAME.json

FOLDER is the trained hybrid of benchmarks/models, or `random` for random weights in the shape of Qwen3.5. Each prompt
is a part of WikiText-2's test split. Its states are restored once; `each turn` restores them again after each 64
tokens, as a conversation does. mlx-lm's own caches hold keys and values, so that nothing else differs; the last row is
what the default profile of keys and values changes, with exact states.
"""

import argparse
import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import qwen3_5
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from benchmarks.reports import save
from mlx_tq import load
from mlx_tq.cache.layer import cache_parts
from mlx_tq.cache.recurrent_states import EXACT, Q8, is_state, pack_state, pack_states, unpack_state, unpack_states
from mlx_tq.cli.inputs import load_text
from mlx_tq.codec import CodecOptions, get_format
from mlx_tq.config import DEFAULT_PROFILE, PROFILES
from mlx_tq.prompt_cache.compressed import compressed_attention
from mlx_tq.prompt_cache.compressed import make_prompt_cache as make_compressed_cache
from mlx_tq.prompt_cache.measurements import kl_divergence, log_probabilities
from mlx_tq.prompt_cache.memory import state_nbytes

RANDOM = "random"
STEP, TURN = 256, 64
ROW = 128  # numbers of convolution inputs that share a scale
# The head dims of Qwen3.5 and its successors, and fewer heads.
SHAPE = {
    "model_type": "qwen3_5", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 4096,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 256, "rms_norm_eps": 1e-6,
    "linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "tie_word_embeddings": True, "full_attention_interval": 4,
}  # fmt: skip

Restore = Callable[[list[Any]], list[Any]]


def random_model() -> Any:
    """Return a model with random weights, whose heads forget within one to a few hundred tokens."""
    mx.random.seed(0)
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(SHAPE))
    for layer in model.layers:
        if layer.is_linear:
            layer.linear_attn.A_log = mx.zeros(SHAPE["linear_num_value_heads"])
            layer.linear_attn.dt_bias = mx.linspace(-6, 0, SHAPE["linear_num_value_heads"])
    mx.eval(model.parameters())
    return model


def restore_packed(caches: list[Any]) -> list[Any]:
    return unpack_states(copy.deepcopy(pack_states(caches, Q8)))


def change_arrays(caches: list[Any], change: Callable[[mx.array], mx.array]) -> list[Any]:
    """Change the arrays of recurrent layers: states, and the last inputs of convolutions."""
    for part in cache_parts(caches):
        if isinstance(part, ArraysCache):
            part.cache = [change(array) for array in part.cache]
    return caches


def restore_by_key_channel(caches: list[Any]) -> list[Any]:
    """Restore states whose scales are of the other axis."""

    def restore(array: mx.array) -> mx.array:
        if not is_state(array):
            return array
        return mx.contiguous(unpack_state(pack_state(array.swapaxes(2, 3)), array.dtype).swapaxes(2, 3))

    return change_arrays(copy.deepcopy(caches), restore)


def restore_inputs_as(name: str, caches: list[Any]) -> list[Any]:
    """Restore states at 8 bits, and the last inputs of convolutions in a format of the package."""
    codec = get_format(name).codec(ROW, CodecOptions())

    def restore(array: mx.array) -> mx.array:
        if is_state(array):
            return array
        rows = codec.decode(codec.encode(array.reshape(*array.shape[:-1], -1, ROW)))
        return rows.reshape(array.shape).astype(array.dtype)

    return change_arrays(restore_packed(caches), restore)


# How states are restored, and whether they are at each turn.
FORMATS: dict[str, tuple[Restore, bool]] = {
    "exact": (copy.deepcopy, False),
    "q8": (restore_packed, False),
    "q8, each turn": (restore_packed, True),
    "q8, scales of key channels": (restore_by_key_channel, False),
    "q8, also convolution inputs": (partial(restore_inputs_as, "q8"), False),
    "q8, convolution inputs tcq3": (partial(restore_inputs_as, "tcq3"), False),
}


def prefill(model: Any, ids: list[int], caches: list[Any]) -> list[Any]:
    with compressed_attention(model):
        for start in range(0, len(ids), STEP):
            model(mx.array(ids[start : start + STEP])[None], cache=caches)
            mx.eval([cache.state for cache in caches])
    return caches


def score_continuation(model: Any, ids: list[int], caches: list[Any], restore: Restore, *, each_turn: bool) -> mx.array:
    """Return the log-probabilities after each of `ids`, which continue from restored caches."""
    caches, parts = restore(caches), []
    with compressed_attention(model):
        for start in range(0, len(ids), TURN):
            parts.append(log_probabilities(model, ids[start : start + TURN], caches))
            mx.eval(parts[-1])
            caches = restore(caches) if each_turn else caches
    return mx.concatenate(parts)


def greedy(model: Any, last: int, caches: list[Any], restore: Restore, count: int, *, each_turn: bool) -> list[int]:
    caches, tokens = restore(caches), [last]
    with compressed_attention(model):
        while len(tokens) <= count:
            tokens.append(log_probabilities(model, tokens[-1:], caches)[0].argmax().item())
            if each_turn and len(tokens) % TURN == 0:
                caches = restore(caches)
    return tokens[1:]


def compare(
    name: str, runs: list[tuple[mx.array, list[int]]], exact: list[tuple[mx.array, list[int]]]
) -> dict[str, Any]:
    divergence = mx.concatenate([kl_divergence(a, b) for (a, _), (b, _) in zip(exact, runs, strict=True)])
    top1 = [(a.argmax(axis=-1) == b.argmax(axis=-1)).mean().item() for (a, _), (b, _) in zip(exact, runs, strict=True)]
    agreed = [
        next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), len(a))
        for (_, a), (_, b) in zip(exact, runs, strict=True)
    ]
    return {
        "format": name,
        "kld": divergence.mean().item(),
        "kld_99": float(np.quantile(np.array(divergence), 0.99)),
        "top1": 100 * fmean(top1),
        "equal_answers": sum(count == len(exact[0][1]) for count in agreed),
        "agreed_tokens": agreed,
    }


def measure(model: Any, ids: list[int], args: argparse.Namespace) -> list[dict[str, Any]]:
    size = args.length + args.answer
    texts = [ids[start : start + size] for start in range(0, args.prompts * size, size)]
    if len(texts[-1]) < size:
        raise SystemExit(f"the text has {len(ids):,} tokens, too few for {args.prompts} prompts of {size:,}.")
    prompts = [prefill(model, text[: args.length], make_prompt_cache(model)) for text in texts]
    compressed = partial(make_compressed_cache, model, PROFILES[DEFAULT_PROFILE])
    arms = {name: (prompts, *how) for name, how in FORMATS.items()}
    packed = [prefill(model, text[: args.length], compressed()) for text in texts]
    arms[f"exact, K/V {DEFAULT_PROFILE}"] = (packed, copy.deepcopy, False)
    runs, rows = {}, []
    for name, (caches, restore, each_turn) in arms.items():
        runs[name] = [
            (
                score_continuation(model, text[args.length :], held, restore, each_turn=each_turn),
                greedy(model, text[args.length], held, restore, args.answer, each_turn=each_turn),
            )
            for text, held in zip(texts, caches, strict=True)
        ]
        rows.append(compare(name, runs[name], runs["exact"]))
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a hybrid, or random")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--answer", type=int, default=256, help="tokens after the states are restored")
    parser.add_argument("--json", required=True, help="file of benchmarks/results")
    args = parser.parse_args()
    model, tokenizer = load(None if args.model == RANDOM else args.model, dtype="float32")
    ids = tokenizer.encode(load_text())
    if args.model == RANDOM:
        model = random_model()
    nbytes = {name: state_nbytes(model, name) for name in (EXACT, Q8)}
    sizes = f"--prompts {args.prompts} --length {args.length} --answer {args.answer}"
    command = f"python -m benchmarks.studies.state_formats --model {Path(args.model).name} {sizes} --json {args.json}"
    about = {"prompts": args.prompts, "length": args.length, "answer": args.answer, "state_bytes": nbytes}
    save(args.json, command, **about, rows=measure(model, ids, args))


if __name__ == "__main__":
    main()
