"""Random wrong values in a GGUF file: it loads and computes, or one line says what is wrong."""

import math
import random

import mlx.core as mx
import pytest
from jinja2 import TemplateError
from random_files import check_errors, exit_codes

import mlx_tq
from mlx_tq.errors import MlxTqError
from mlx_tq.models.gguf_file import read_gguf

from .gguf_files import encode_file, typed, write_gguf

# Names that the loader looks for, whether the file has them or not.
OTHER_KEYS = (
    "general.alignment", "llama.attention.key_length", "llama.attention.value_length", "llama.rope.dimension_count",
    "llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.rope.scaling.original_context_length",
    "llama.rope.scaling.color", "llama.expert_count", "llama.attention.sliding_window", "tokenizer.ggml.scores",
    "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token", "tokenizer.ggml.bos_token_id",
    "tokenizer.ggml.unknown_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.add_space_prefix",
)  # fmt: skip
INTEGERS = [0, 1, 2, 3, 4, 7, 8, 16, 64, 100, 4095, 4096, 2**31 - 1]
VALUES = [
    *(("I", value) for value in (*INTEGERS, 2**31, 2**32 - 1)),
    *(("q", value) for value in (*INTEGERS, -1, -7, -(2**63), 2**63 - 1)),
    *(("Q", value) for value in (2**40, 2**63, 2**64 - 1)),
    *(("f", value) for value in (0.0, -0.0, 0.5, 3.5, 4.0, -1.0, 1e30, 1e-40, math.inf, -math.inf, math.nan)),
    *(("d", value) for value in (1e300, 5e-324, 64.0)),
    ("?", True), ("?", False), ("B", 200), ("b", -1), ("h", 2),
    *(("str", value) for value in ("", "x", "none", "yarn", "linear", "llama", "gpt2", "qwen3", "gemma3", "llama-bpe")),
    *(("str", value) for value in ("x" * 50_000, "a\nb\x1b[31m", "{{", "{% for x in y %}", "{{ 1 / 0 }}", "\0", "4")),
    ("str", "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}"),
    *(("list", ("I", value)) for value in ([], [0], [2, 2], [2, 4], [3] * 4096, [2**32 - 1] * 4096)),
    *(("list", ("f", value)) for value in ([], [math.nan] * 4096, [0.0] * 4096, [math.inf, 1.0])),
    *(("list", ("str", value)) for value in ([], [""], ["a b"], ["x" * 50_000], ["t"] * 4096, [" "] * 100)),
    ("list", ("str", [str(number) for number in range(4096)])),
    ("list", ("str", ["x" * 200_000, *(str(number) for number in range(4095))])),
    ("list", ("?", [True, False])),
]  # fmt: skip
SHAPES = [(), (0,), (1,), (64,), (4096, 64), (64, 4096), (1, 1, 1, 1), (0, 64), (2**40,), (2**31, 2**33), (64, 64, 1)]
NAMES = ["", "x" * 50_000, "blk.0.attn_q.weight", "blk.x.attn_q.weight", "blk.99.attn_q.weight", "output.weight", "\n"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The keys and tensors of a file, and their bytes."""
    path = write_gguf(tmp_path_factory.mktemp("whole") / "model.gguf", kind="Q8_0")
    file = read_gguf(path)
    first = min(tensor.start for tensor in file.tensors.values())
    tensors = [(each.name, each.shape, each.kind, each.start - first) for each in file.tensors.values()]
    return {name: typed(value) for name, value in file.metadata.items()}, tensors, path.read_bytes()[first:]


def mutate(whole, seed):
    """Return a file in which one to three keys or tensors are wrong."""
    keys, tensors, data = whole
    keys, tensors, rng = dict(keys), list(tensors), random.Random(seed)
    for _ in range(rng.choice((1, 1, 2, 3))):
        match rng.choices(("value", "element", "absent", "tensor"), (8, 3, 1, 4))[0]:
            case "value":
                keys[rng.choice([*keys, *OTHER_KEYS])] = rng.choice(VALUES)
            case "element":
                keys |= change_element(keys, rng)
            case "absent":
                del keys[rng.choice(list(keys))]
            case "tensor":
                number = rng.randrange(len(tensors))
                tensors[number : number + 1] = change_tensor(*tensors[number], rng)
    return encode_file(keys, tensors, data)


def change_tensor(name, shape, kind, start, rng):
    """Return a tensor of which one part is wrong, or none."""
    starts = (1, 32, 2**40, 2**64 - 1)
    others = [(name, rng.choice(SHAPES), kind, start), (name, shape, rng.randrange(45), start)]
    others += [(name, shape, kind, rng.choice(starts)), (rng.choice(NAMES), shape, kind, start)]
    return [rng.choice(others)] if rng.random() < 0.8 else []


def change_element(keys, rng):
    """Return a key whose list has one wrong element."""
    lists = {name: value for name, (code, value) in keys.items() if code == "list" and value[1]}
    if not lists:
        return {}
    name, (inner, elements) = rng.choice(list(lists.items()))
    wrong = [value for code, value in VALUES if code == inner]
    elements = list(elements)
    elements[rng.randrange(len(elements))] = rng.choice([*wrong, rng.choice(elements)])
    return {name: ("list", (inner, elements))}


def load_and_compute(path):
    """Return the error of mlx_tq if a file cannot be used."""
    try:
        model, tokenizer = mlx_tq.load(path)
        logits = model(mx.array([tokenizer.encode("one two") or [0]]))
        mx.eval(logits)
        assert logits.shape[2] == model.args.vocab_size
        if tokenizer.has_chat_template:
            tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    except MlxTqError as error:
        return str(error)
    except TemplateError:  # which commands report
        pass
    return None


# 5,000 files take three minutes.
@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(1000, 6000), marks=pytest.mark.full)], ids=len)
def test_it_loads_and_computes_or_says_why_not(whole, tmp_path, seeds):
    path = tmp_path / "model.gguf"

    def attempt(seed):
        path.write_bytes(mutate(whole, seed))
        return load_and_compute(path)

    check_errors(seeds, attempt, r"[^\n]{50,700}\.")


@pytest.mark.full  # each of 24 processes takes three seconds
def test_the_command_ends_in_an_answer_or_in_one_line(whole, tmp_path):
    path = tmp_path / "model.gguf"
    words = ("generate", "--model", path, "-p", "hi", "-m", 1, "--verbose", "F")
    assert exit_codes(range(24), lambda seed: path.write_bytes(mutate(whole, seed)), *words) == {0, 1, 2}
