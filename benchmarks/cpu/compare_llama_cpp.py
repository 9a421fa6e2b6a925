"""Compare llama.cpp and mlx_tq on one model, SmolLM2-135M-Instruct, whose GGUF file both load.

    python -m benchmarks.cpu.compare_llama_cpp

llama.cpp uses two threads, flash attention and the quantized weights of the file. mlx_tq uses all cores and dense
float32 weights, because mlx multiplies quantized matrices slowly on a CPU. Both prefill the same tokens and take turns.
Rounds after the first `--prefill-rounds` decode from prefilled caches.

llama.cpp is not a dependency. Compile llama-cpp-python for the machine's processor:

    CMAKE_ARGS="-DGGML_NATIVE=ON" pip install --no-binary llama-cpp-python llama-cpp-python

GCC 12 needs CFLAGS and CXXFLAGS="-fno-tree-dse -fno-dse" too.
"""

import argparse
import copy
import statistics
import time
from typing import Any

import numpy as np

from benchmarks.reports import named_model, save
from mlx_tq.bench.model import BenchedCache, Caches, decode, prefill
from mlx_tq.cli.inputs import load_text
from mlx_tq.config import PROFILES
from mlx_tq.models.load import smollm2_path

THREADS = 2
PREFILL_STEP = 2048
BLOCK_BYTES = {"f16": 2 * 32, "q8_0": 34, "q4_0": 18}  # of 32 values
PROFILES_TIMED = ("off", "balanced", "small")


def import_llama_cpp() -> Any:
    try:
        import llama_cpp
    except ModuleNotFoundError as error:
        raise SystemExit(f"{error}: install llama-cpp-python, see benchmarks/cpu/compare_llama_cpp.py") from error
    return llama_cpp


class LlamaArm:
    """llama.cpp with keys and values of one type."""

    def __init__(self, kind: str, prompt: list[int], max_tokens: int) -> None:
        self._llama_cpp = import_llama_cpp()
        self.name, self._kind, self._prompt, self._max_tokens = f"llama.cpp {kind}", kind, prompt, max_tokens
        type_of_cache = getattr(self._llama_cpp, f"GGML_TYPE_{kind.upper()}")
        self._llama = self._llama_cpp.Llama(
            str(smollm2_path()),
            n_ctx=len(prompt) + max_tokens + 1,
            n_batch=PREFILL_STEP,
            n_threads=THREADS,
            n_threads_batch=THREADS,
            flash_attn=True,
            type_k=type_of_cache,
            type_v=type_of_cache,
            verbose=False,
        )

    def _next_token(self, tokens: list[int]) -> int:
        self._llama.eval(tokens)
        logits = self._llama_cpp.llama_get_logits_ith(self._llama.ctx, -1)
        return int(np.ctypeslib.as_array(logits, shape=(self._llama.n_vocab(),)).argmax())

    def prefill(self) -> float:
        """Prefill and return the seconds to the first token."""
        self._llama.reset()
        started = time.perf_counter()
        self._next_token(self._prompt)
        return time.perf_counter() - started

    def decode(self) -> float:
        """Decode after the prompt and return tokens per second; the first step is not timed, as in mlx_tq."""
        self._llama.n_tokens = len(self._prompt)  # the next call removes what lies beyond
        token = self._next_token(self._prompt[-1:])
        started = time.perf_counter()
        for _ in range(self._max_tokens - 1):
            token = self._next_token([token])
        return (self._max_tokens - 1) / (time.perf_counter() - started)

    def kv_nbytes(self) -> int:
        about = self._llama.metadata
        layers, heads = (int(about[f"llama.{name}"]) for name in ("block_count", "attention.head_count_kv"))
        head_dim = int(about["llama.embedding_length"]) // int(about["llama.attention.head_count"])
        return 2 * int(self._llama.n_ctx()) * layers * heads * head_dim // 32 * BLOCK_BYTES[self._kind]


class MlxArm:
    """mlx-lm with its own caches or compressed ones."""

    def __init__(self, profile: str, model: Any, prompt: list[int], max_tokens: int) -> None:
        config = PROFILES[profile]
        self._benched = BenchedCache(profile, None if config.is_off else config)
        self.name, self._model, self._prompt, self._max_tokens = f"mlx_tq {profile}", model, prompt, max_tokens
        self._prefilled: Caches = []
        self._decoded: Caches = []

    def prefill(self) -> float:
        with self._benched.attention(self._model):
            self._prefilled = self._benched.make(self._model)
            return prefill(self._model, self._prompt, self._prefilled, PREFILL_STEP)

    def decode(self) -> float:
        self._decoded = copy.deepcopy(self._prefilled)
        with self._benched.attention(self._model):
            return decode(self._model, self._decoded, self._prompt[-1], self._max_tokens)

    def kv_nbytes(self) -> int:
        return sum(cache.nbytes for cache in self._decoded)


def measure(arms: list[LlamaArm | MlxArm], tokens: int, rounds: int, prefill_rounds: int) -> list[dict[str, Any]]:
    prefills: dict[str, list[float]] = {arm.name: [] for arm in arms}
    decodes: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for number in range(rounds):
        for arm in arms:
            if number < prefill_rounds:
                prefills[arm.name].append(tokens / arm.prefill())
            decodes[arm.name].append(arm.decode())
    return [
        {
            "arm": arm.name,
            "tokens": tokens,
            "prefill_tps": statistics.median(prefills[arm.name]),
            "prefill_low": min(prefills[arm.name]),
            "prefill_high": max(prefills[arm.name]),
            "decode_tps": statistics.median(decodes[arm.name]),
            "low": min(decodes[arm.name]),
            "high": max(decodes[arm.name]),
            "kv_nbytes": arm.kv_nbytes(),
        }
        for arm in arms
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 7500])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefill-rounds", type=int, help="rounds that also prefill (default: all)")
    parser.add_argument("--max-tokens", type=int, default=33, help="tokens to decode; the first is not timed")
    args = parser.parse_args()
    llama_cpp = import_llama_cpp()
    model, tokenizer = named_model("smollm2")
    ids, figures = list(tokenizer.encode(load_text(), add_special_tokens=False, verbose=False)), []
    for tokens in args.tokens:
        run = (ids[:tokens], args.max_tokens)
        arms: list[LlamaArm | MlxArm] = [LlamaArm(kind, *run) for kind in BLOCK_BYTES]
        arms += [MlxArm(profile, model, *run) for profile in PROFILES_TIMED]
        for figure in measure(arms, tokens, args.rounds, args.prefill_rounds or args.rounds):
            print(figure, flush=True)
            figures.append(figure)
    fields = {"threads": THREADS, "llama_cpp_python": llama_cpp.__version__, "weights": smollm2_path().name}
    save("llama_cpp.json", "python -m benchmarks.cpu.compare_llama_cpp", **fields, figures=figures)


if __name__ == "__main__":
    main()
