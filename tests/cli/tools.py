"""Commands as a user runs them: in this process where that proves the same, in one of their own where it does not."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from zoo import ARCHITECTURES, build

from mlx_tq.models import embedded_path

ROOT = Path(__file__).resolve().parents[2]
EMBEDDED = embedded_path()
VOCABULARY, EMBEDDINGS = 4096, "model.embed_tokens.weight"  # of the embedded model

# A small window, so that a text of a page is mostly packed.
PACKED = ("--kv-profile", "small", "--kv-sinks", "16", "--kv-window", "32")
FLOAT32 = ("--dtype", "float32")  # a CPU takes a third as long as for the embedded model's own bfloat16


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


def facts(count, key=417295):
    """A text with a number to be found in it, and the question that the embedded model knows."""
    lines = [f"The garden of house {n} has {n % 7} trees and a gate." for n in range(count)]
    lines.insert(count // 2, f"The access code is {key}.")
    return " ".join(lines), " What is the access code?"


def environment(**changes):
    """The environment of a process that finds this copy of mlx_tq."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MLX_TQ_")}
    return {**env, "PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_TELEMETRY": "1", "TERM": "xterm", **changes}


def command(*words):
    return [sys.executable, "-m", "mlx_tq", *map(str, words)]


def copy_model(folder, weights=None, template=None, **config):
    """The embedded model in a folder, with changes to its configuration, its weights and its chat template."""
    shutil.copytree(EMBEDDED, folder)
    if config:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    if template is not None:
        path = folder / "tokenizer_config.json"
        found = json.loads(path.read_text())
        path.write_text(json.dumps({**found, "chat_template": template(found["chat_template"])}))
    if weights is not None:
        path = folder / "model.safetensors"
        mx.save_safetensors(str(path), weights(dict(mx.load(str(path)))))
    return folder


def float32_model(folder, extra_tokens=0):
    """The embedded model in float32: greedy choices do not hang on rounding, and a CPU is quicker.

    `extra_tokens` more have embeddings, copies of token 1's.
    """

    def change(weights):
        weights = {name: weight.astype(mx.float32) for name, weight in weights.items()}
        table = weights[EMBEDDINGS]
        return {**weights, EMBEDDINGS: mx.concatenate([table, mx.repeat(table[1:2], extra_tokens, axis=0)])}

    return copy_model(folder, change, vocab_size=VOCABULARY + extra_tokens)


def zoo_model(folder, name, *, spread=False, **config):
    """A tiny random model of the zoo as a checkpoint folder, with the embedded model's tokenizer."""
    changes = {"vocab_size": VOCABULARY, **config}
    model = build(name, spread=spread, **changes)
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(ARCHITECTURES[name].resized(**changes)))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / file, folder)
    return folder


def packed_model(folder):
    """A tiny random model of 4-bit weights with bfloat16 scales, as most models of the hub have."""
    model, config = build("llama", mx.bfloat16, vocab_size=VOCABULARY), {"group_size": 64, "bits": 4}
    zoo_model(folder, "llama")
    nn.quantize(model, **config)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**about, "quantization": config}))
    return folder


def refused(result, *says, code=2):
    """A command said in one line why it cannot do what was asked, and nothing else; returns that line."""
    assert (result.code, result.out) == (code, "")
    (line,) = result.err.splitlines()
    assert line.startswith("mlx_tq ")
    assert line.endswith(".")
    for words in says:
        assert words in line
    return line
