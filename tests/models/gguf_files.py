"""GGUF files of tiny random models, written by llama.cpp's own package as its converter writes them."""

import json
import math
import struct
from importlib import import_module

import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES
from gguf.quants import dequantize, quantize
from mlx.utils import tree_flatten, tree_unflatten

from mlx_tq.models import embedded_path

WIDE = {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 2.0**-17, "vocab_size": 4096, "rope_theta": 5000.0,
    "max_position_embeddings": 512,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
# Architecture in the file, and mlx-lm's configuration; of gemma3's 7 layers all but the sixth slide.
MODELS = {
    "llama": ("llama", {**WIDE, "head_dim": 16, "rope_scaling": None, **TIED}),
    "llama with wide heads": ("llama", {**WIDE, "rope_scaling": {"type": "linear", "factor": 4.0}, **UNTIED}),
    "llama 3": ("llama", {**WIDE, "head_dim": 64, "rope_theta": 500_000.0, "rope_scaling": LLAMA3, **TIED}),
    "qwen3": ("qwen3", {**WIDE, "rope_scaling": YARN, **TIED}),
    "gemma3": (
        "gemma3",
        {**WIDE, "model_type": "gemma3_text", "num_hidden_layers": 7, "num_key_value_heads": 1, "sliding_window": 8,
         "sliding_window_pattern": 6, "rope_local_base_freq": 10_000.0, "query_pre_attn_scalar": 32,
         "rope_scaling": {"type": "linear", "factor": 8.0}},
    ),
}  # fmt: skip


def make_model(name):
    """Make a random model of mlx-lm in float32; without `output` gemma3 is tied, as its files are."""
    architecture, config = MODELS[name]
    config = {"model_type": architecture, **config}
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.sanitize({})
    for key, weight in tree_flatten(model.parameters()):
        random = mx.random.normal(weight.shape) * (0.3 if weight.ndim == 1 else 0.15)
        if weight.ndim == 1:  # of norms; 1 can be added to it and taken off again
            random = mx.round(random * 1024) / 1024 + (architecture != "gemma3")
        model.update(tree_unflatten([(key, random)]))
    return model


def round_weights(model, kind):
    """Round weights to what a file of that kind holds, with the arithmetic of the gguf package."""
    kind = GGMLQuantizationType[kind]
    for name, weight in tree_flatten(model.parameters()):
        if weight.ndim == 2:
            found = dequantize(quantize(np.array(weight), kind), kind)
            model.update(tree_unflatten([(name, mx.array(found.astype(np.float32)))]))
    return model


def frequency_factors(config):
    """Return the factors that llama.cpp's converter writes for Llama 3.1, from its loop."""
    scaling, factors = config["rope_scaling"], []
    trained = scaling["original_max_position_embeddings"]
    for dim in range(0, config["head_dim"], 2):
        turns = trained / (2 * math.pi * config["rope_theta"] ** (dim / config["head_dim"]))
        if turns > scaling["high_freq_factor"]:
            factors.append(1.0)
        elif turns < scaling["low_freq_factor"]:
            factors.append(scaling["factor"])
        else:
            smooth = (turns - scaling["low_freq_factor"]) / (scaling["high_freq_factor"] - scaling["low_freq_factor"])
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, np.float32)


def hyperparameters(name):
    """Return the hyperparameters of a file, as the converter writes them."""
    architecture, config = MODELS[name]
    keys = {
        "block_count": config["num_hidden_layers"], "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"], "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"], "rope.freq_base": config["rope_theta"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
    }  # fmt: skip
    if config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]:
        keys |= {"attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"]}
    if "sliding_window" in config:
        keys["attention.sliding_window"] = config["sliding_window"]
    scaling = config["rope_scaling"] or {}
    if "type" in scaling:
        keys |= {"rope.scaling.type": scaling["type"], "rope.scaling.factor": scaling["factor"]}
    if scaling.get("type") == "yarn":
        keys["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
    return {f"{architecture}.{key}": value for key, value in keys.items()}


def vocabulary():
    """Return the vocabulary of the embedded model, as the converter writes it."""
    tokenizer = json.loads((embedded_path() / "tokenizer.json").read_text("utf-8"))
    template = json.loads((embedded_path() / "tokenizer_config.json").read_text("utf-8"))["chat_template"]
    ids = tokenizer["model"]["vocab"]
    special = {each["content"] for each in tokenizer["added_tokens"]}
    tokens = sorted(ids, key=ids.get)
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in tokenizer["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": ids["<|im_end|>"], "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": template,
    }  # fmt: skip


def write_gguf(path, name="llama", kind="F32", model=None, keys=None, tensors=None):
    """Write a model of MODELS with matrices of a kind; `keys` and `tensors` replace those of the file."""
    architecture, config = MODELS[name]
    model = model or make_model(name)
    writer = GGUFWriter(path, architecture)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in ({**hyperparameters(name), **vocabulary(), **(keys or {})}).items():
        if key == "general.architecture":
            writer.kv_data[0][key].value = value
        elif value is not None:
            add.get(type(value), writer.add_array)(key, value)
    arch = next(each for each, found in MODEL_ARCH_NAMES.items() if found == architecture)
    names = get_tensor_name_map(MODEL_ARCH(arch), config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for mlx_name, weight in tree_flatten(model.parameters()):
        weight, part = np.array(weight), mlx_name.split(".")[-2]
        if architecture == "llama" and part in heads:
            halves = weight.reshape(heads[part], 2, -1, *weight.shape[1:])  # rows are permuted as by the converter
            weight = halves.swapaxes(1, 2).reshape(weight.shape)
        if architecture == "gemma3" and weight.ndim == 1:
            weight = weight + 1
        stored = GGMLQuantizationType[kind if weight.ndim == 2 else "F32"]
        tensor = names.get_name(mlx_name, (".weight",))
        if tensor not in (tensors or {}):
            writer.add_tensor(tensor, quantize(weight, stored), raw_dtype=stored)
    factors = {"rope_freqs.weight": frequency_factors(config)} if config["rope_scaling"] == LLAMA3 else {}
    for tensor, weight in {**factors, **(tensors or {})}.items():
        writer.add_tensor(tensor, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# GGUF's numbers of types of values, with the codes of `struct`.
TYPES = {"B": 0, "b": 1, "H": 2, "h": 3, "I": 4, "i": 5, "f": 6, "?": 7, "str": 8, "list": 9, "Q": 10, "q": 11, "d": 12}


def encode_text(text):
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def encode_value(code, value):
    """Encode a value, with its type; a list is the code of its elements and these."""
    if code == "list":
        inner, elements = value
        encoded = [encode_value(inner, element)[4:] for element in elements]
        return struct.pack("<IIQ", TYPES[code], TYPES[inner], len(elements)) + b"".join(encoded)
    return struct.pack("<I", TYPES[code]) + (encode_text(value) if code == "str" else struct.pack(f"<{code}", value))


def encode_file(keys, tensors, data):
    """Encode a file of keys {name: (code, value)}, tensors [(name, shape, kind, offset)] and their bytes."""
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(keys))]
    parts += [encode_text(name) + encode_value(*typed) for name, typed in keys.items()]
    for name, shape, kind, offset in tensors:
        parts += [encode_text(name), struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, offset)]
    header = b"".join(parts)
    return header + bytes(-len(header) % 32) + data


def typed(value):
    """Return a value with the code of its type, as the converter writes it."""
    if isinstance(value, list):
        return "list", (typed(value[0])[0], value)
    return {bool: "?", int: "I", float: "f", str: "str"}[type(value)], value
