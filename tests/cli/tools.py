"""Commands as a user runs them: in this process where that proves the same, in one of their own where it does not."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import MODEL_REMAPPING
from zoo import ARCHITECTURES

from mlx_tq.models import embedded_path

ROOT = Path(__file__).resolve().parents[2]
EMBEDDED = embedded_path()
LIMIT = 120  # seconds after which a process is taken for stuck

# A small window, so that a text of a page is mostly packed.
PACKED = ("--kv-profile", "small", "--kv-prefix", "16", "--kv-window", "32")


@dataclass(frozen=True)
class Result:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)

    @property
    def errors(self):
        """Lines on stderr that are neither the plan nor the statistics."""
        return [line for line in self.err.splitlines() if re.match(r"mlx_tq\S* ?\w*: ", line)]


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
    """The command line of `mlx_tq WORDS`."""
    return [sys.executable, "-m", "mlx_tq", *map(str, words)]


def run(*words, stdin="", env=None, cwd=None):
    """`mlx_tq WORDS` in a process of its own."""
    done = subprocess.run(
        command(*words),
        input=stdin,
        capture_output=True,
        encoding="utf-8",
        errors="surrogateescape",
        env=environment(**(env or {})),
        cwd=cwd,
        timeout=LIMIT,
        check=False,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def copy_model(folder, weights=None, **config):
    """The embedded model in a folder, with changes to its configuration and its weights."""
    shutil.copytree(EMBEDDED, folder)
    if config:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    if weights is not None:
        path = folder / "model.safetensors"
        mx.save_safetensors(str(path), weights(dict(mx.load(str(path)))))
    return folder


def zoo_model(folder, name, **config):
    """A tiny random model of the zoo as a checkpoint folder, with the embedded model's tokenizer."""
    changed = {**ARCHITECTURES[name].config, "vocab_size": 4096, **config}
    module = import_module(f"mlx_lm.models.{MODEL_REMAPPING.get(changed['model_type'], changed['model_type'])}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(changed))
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(changed))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / file, folder)
    return folder
