"""GGUF files load as mlx-lm's models with the same weights and logits, or say why they cannot."""

import math
import random
from contextlib import suppress

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from mlx.utils import tree_flatten

import mlx_tq
from mlx_tq.errors import ConfigError, MlxTqError, UnsupportedModelError
from mlx_tq.models import dense_weights

from .gguf_files import MODELS, make_model, round_weights, write_gguf

IDS = mx.array([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]])  # longer than a window of 8
DENSE, PACKED = ("F32", "F16", "BF16", "Q5_0"), ("Q4_0", "Q4_1", "Q8_0")


@pytest.mark.parametrize(("name", "kind"), [*((name, "F32") for name in MODELS), *(("gemma3", kind) for kind in DENSE)])
def test_dense_files_load_as_the_model_that_they_were_made_from(tmp_path, name, kind):
    model = round_weights(make_model(name), kind)
    loaded, _ = mlx_tq.load(write_gguf(tmp_path / "model.gguf", name, kind, model), dtype="float32")
    assert vars(loaded.args) == vars(model.args)
    assert mx.array_equal(loaded(IDS), model(IDS)).item()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("llama", kind) for kind in PACKED),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (("qwen3", "Q4_1"), ("gemma3", "Q4_0"))),
    ],
)
def test_blocks_stay_packed_and_lose_nothing(tmp_path, name, kind):
    """The packed bits are those that mlx reads; logits are as near to float64 as the dense model's."""
    path = write_gguf(tmp_path / "model.gguf", name, kind)
    theirs = mx.load(str(path))
    packed, _ = mlx_tq.load(path, dtype="float32", dequantize=False)
    layer, theirs_of = packed.model.layers[1].mlp.up_proj, "blk.1.ffn_up."
    assert isinstance(layer, nn.QuantizedLinear)
    assert isinstance(packed.model.embed_tokens, nn.QuantizedEmbedding)
    for part in ("weight", "scales", "biases"):
        assert mx.array_equal(layer[part], theirs[theirs_of + part]).item(), part

    dense, _ = mlx_tq.load(path, dtype="float32", dequantize=True)
    model = round_weights(make_model(name), kind)
    for key, weight in tree_flatten(model.parameters()):
        assert mx.array_equal(weight, dict(tree_flatten(dense.parameters()))[key]).item(), key
    model.set_dtype(mx.float64)
    exact = model(IDS)
    error, own = (mx.abs(each(IDS) - exact).max().item() for each in (packed, dense))
    assert 0 < error <= 3 * own


def test_a_cpu_makes_blocks_dense_unless_they_are_to_stay_packed(tmp_path):
    """In float32, or the type that was asked for, each weight rounded once."""
    path = write_gguf(tmp_path / "model.gguf", "llama", "Q4_1")
    exact = dict(tree_flatten(mlx_tq.load(path, dtype="float32", dequantize=True)[0].parameters()))
    for dtype in (None, "float32", "bfloat16"):
        model, _ = mlx_tq.load(path, dtype=dtype)
        for name, weight in tree_flatten(model.parameters()):
            assert mx.array_equal(weight, exact[name].astype(getattr(mx, dtype or "float32"))), name
    sizes = dense_weights(mlx_tq.load(path)[0])
    assert sizes.dense_nbytes == sum(weight.nbytes for weight in exact.values())
    packed, _ = mlx_tq.load(path, dequantize=False)
    assert isinstance(packed.model.embed_tokens, nn.QuantizedEmbedding)
    assert sizes.packed_nbytes == sum(weight.nbytes for _, weight in tree_flatten(packed.parameters()))


def test_scales_of_bfloat16_are_the_only_rounding(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", "llama", "Q4_1")
    exact, _ = mlx_tq.load(path, dtype="float32", dequantize=False)
    loaded, _ = mlx_tq.load(path, dtype="bfloat16", dequantize=False)
    assert loaded(IDS).dtype == mx.bfloat16
    for name, weight in tree_flatten(exact.parameters()):
        rounded = dict(tree_flatten(loaded.parameters()))[name]
        error = mx.abs(rounded.astype(mx.float32) - weight.astype(mx.float32))
        assert (error <= mx.abs(weight.astype(mx.float32)) / 256).all().item(), name
        assert (rounded.dtype == mx.bfloat16) == (weight.dtype == mx.float32)


def test_the_type_is_that_of_the_numbers_in_the_file(tmp_path):
    types = {"F16": mx.float16, "BF16": mx.bfloat16, "F32": mx.float32, "Q5_0": mx.bfloat16, "Q8_0": mx.float32}
    assert mx.default_device() == mx.cpu  # where packed blocks are float32
    for kind, dtype in types.items():
        model, _ = mlx_tq.load(write_gguf(tmp_path / f"{kind}.gguf", "qwen3", kind))
        assert model(IDS).dtype == dtype, kind


@pytest.mark.parametrize("factor", [4.0, 1.0])
def test_the_older_name_of_linear_scaling(tmp_path, factor):
    path = write_gguf(tmp_path / "model.gguf", "llama", "F32", keys={"llama.rope.scale_linear": factor})
    plain, _ = mlx_tq.load(write_gguf(tmp_path / "plain.gguf", "llama", "F32"))
    model, _ = mlx_tq.load(path)
    assert model.args.rope_scaling == ({"type": "linear", "factor": 4.0} if factor == 4 else None)
    assert mx.array_equal(model(IDS), plain(IDS)) == (factor != 4)


# The changed keys or tensors, and the error that they cause.
U, C = UnsupportedModelError, ConfigError
REFUSED = {
    "architecture": (
        {"general.architecture": "mamba"},
        U,
        "architecture 'mamba' is not supported; supported are llama, qwen3, gemma3",
    ),
    "pre-tokenizer": ({"tokenizer.ggml.pre": "tekken"}, U, "pre-tokenizer 'tekken': .* Valid are gpt-2, smollm"),
    "tokenizer": ({"tokenizer.ggml.model": "bert"}, U, "tokenizer 'bert'"),
    "scaling": ({"llama.rope.scaling.type": "longrope"}, U, "RoPE scaling 'longrope'; valid are none, linear, yarn"),
    "scaling's number": ({"llama.rope.scaling.attn_factor": 2.0}, U, "rope.scaling.attn_factor"),
    "scaling's lack": ({"llama.rope.scaling.type": "linear"}, C, "no llama.rope.scaling.factor"),
    "experts": ({"llama.expert_count": 8}, U, "llama.expert_count = 8"),
    "partial RoPE": ({"llama.rope.dimension_count": 8}, U, "dimension_count = 8 and heads of 16"),
    "lack": ({"llama.block_count": None}, C, "it has no llama.block_count"),
    "text for a number": ({"llama.embedding_length": "wide"}, C, "embedding_length is wide, not a number above 0"),
    "no whole number": ({"llama.embedding_length": 3.5}, C, "embedding_length is 3.5, not a whole number up to 2"),
    "too wide": ({"llama.embedding_length": 2**31}, C, "embedding_length is 2147483648, not a whole number"),
    "infinite": ({"llama.rope.freq_base": math.inf}, C, "rope.freq_base is inf, not a number above 0"),
    "other heads": ({"llama.attention.head_count_kv": [2, 1]}, U, r"head_count_kv = \[2, 1\], .* one number for all"),
    "heads of text": ({"llama.attention.head_count_kv": ["2", "2"]}, C, "head_count_kv is 2, not a number above 0"),
    "scaling of a list": ({"llama.rope.scaling.type": ["yarn"]}, U, r"unknown RoPE scaling \"\['yarn'\]\""),
    "tokens of numbers": ({"tokenizer.ggml.tokens": [1, 2]}, C, r"tokens is \[1, 2\], not a list of str"),
    "merges of text": ({"tokenizer.ggml.merges": "a b"}, C, "merges is a b, not a list of str"),
    "template of numbers": ({"tokenizer.chat_template": 7}, C, "its chat template is 7, not a text"),
    "a long merge": ({"tokenizer.ggml.merges": ["x" * 50_000]}, C, r"the merge 'x{60}\.\.\.' is not"),
    "a long name": ({"x" * 50_000 + ".weight": np.zeros((1, 1), np.float32)}, U, r"its tensor x{60}\.\.\.\."),
    "other width": ({"llama.embedding_length": 128}, C, "Expected shape"),
    "more layers": ({"llama.block_count": 10**9}, C, "has 1000000000 layers, and has 2"),
    "other tokens": ({"tokenizer.ggml.token_type": [1]}, C, "4096 tokens and 1 types"),
    "merge": ({"tokenizer.ggml.merges": ["no such"]}, C, "the merge 'no such'"),
    "end": ({"tokenizer.ggml.eos_token_id": 5000}, C, "its eos token is 5000 of 4096"),
    "tensor": ({"blk.0.gate_inp.weight": np.zeros((8, 64), np.float32)}, U, "no place for its tensor blk.0.gate_inp"),
    "kind": ({"blk.0.attn_norm.weight": np.zeros(64, np.int32)}, U, "cannot be dequantized"),
    "frequencies": ({"rope_freqs.weight": np.arange(1, 9, dtype=np.float32)}, U, "factors in rope_freqs"),
}


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_unsupported_and_damaged_parts_are_named(tmp_path, changes, error, message):
    kind = "tensors" if next(iter(changes)).endswith(".weight") else "keys"
    with pytest.raises(error, match=message) as raised:
        mlx_tq.load(write_gguf(tmp_path / "model.gguf", **{kind: changes}))
    assert "model.gguf" in str(raised.value)
    assert len(str(raised.value)) < 500


def test_truncated_and_changed_files_raise_errors_of_mlx_tq(tmp_path):
    data = (path := write_gguf(tmp_path / "model.gguf", kind="Q4_0")).read_bytes()
    keys, infos = data.index(b"tokenizer.ggml.tokens"), data.index(b"tokenizer.chat_template")
    rng = random.Random(0)
    header = [*range(keys), *range(infos, infos + 1500)]
    for end in [0, 3, 4, 7, 20, *rng.sample(header, 10), len(data) // 2, len(data) - 1]:
        path.write_bytes(data[:end])
        with pytest.raises(ConfigError, match=r"does not begin with the letters GGUF|it ends in the middle of"):
            mlx_tq.load(path)
    for place in rng.sample(header, 25):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :])
        with suppress(MlxTqError):
            mlx_tq.load(path)


@pytest.mark.parametrize("version", [b"\1\0\0\0", b"\0\0\0\3"], ids=["1", "big-endian"])
def test_versions(tmp_path, version):
    path = write_gguf(tmp_path / "model.gguf")
    path.write_bytes(b"GGUF" + version + path.read_bytes()[8:])
    with pytest.raises(ConfigError, match=r"of version \d+; valid are"):
        mlx_tq.load(path)


def split(path, folder, count, **changes):
    """Write a file in `count` parts, as llama.cpp's gguf-split does: only the first has the model's keys."""
    reader = GGUFReader(path)
    parts = [reader.tensors[number::count] for number in range(count)]
    for number, tensors in enumerate(parts):
        part = folder / f"model-{number + 1:05}-of-{count:05}.gguf"
        writer = GGUFWriter(part, "llama")
        keys = {"split.no": number, "split.count": count, "split.tensors.count": len(reader.tensors), **changes}
        if number:
            writer.kv_data[0].clear()
        else:
            for field in list(reader.fields.values())[3:]:
                if field.name != "general.architecture":
                    of = field.types[1] if len(field.types) > 1 else None
                    writer.add_key_value(field.name, field.contents(), field.types[0], of)
        for key, value in keys.items():
            writer.add_uint16(key, value)
        for tensor in tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return sorted(folder.glob("model-*"))


def test_a_split_file_is_read_from_all_parts(tmp_path):
    """As llama.cpp does; any part may be given."""
    whole, _ = mlx_tq.load(path := write_gguf(tmp_path / "whole.gguf", kind="Q4_0"))
    for part in split(path, tmp_path, 3):
        loaded, tokenizer = mlx_tq.load(part)
        assert mx.array_equal(loaded(IDS), whole(IDS)).item()
        assert tokenizer.chat_template is not None


def test_parts_that_are_missing_or_damaged_are_named(tmp_path):
    path = write_gguf(tmp_path / "whole.gguf", kind="Q4_0")
    parts = split(path, tmp_path, 3)
    whole = parts[1].read_bytes()
    parts[1].write_bytes(whole[:-1000])
    with pytest.raises(ConfigError, match=r"00002-of-00003\.gguf' cannot be loaded: it ends in the middle of "):
        mlx_tq.load(parts[0])
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(ConfigError, match=r"00002-of-00003\.gguf' cannot be loaded: it is not part 2 of 3"):
        mlx_tq.load(parts[0])
    parts[1].unlink()
    for part, number in ((parts[0], 1), (parts[2], 3)):
        message = rf"is part {number} of 3 of a split GGUF file, and model-00002-of-00003\.gguf is not .*--merge"
        with pytest.raises(ConfigError, match=message):
            mlx_tq.load(part)
    parts[1].write_bytes(whole)
    renamed = parts[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(ConfigError, match=r"renamed\.gguf' is part 1 of 3.*llama-gguf-split --merge"):
        mlx_tq.load(renamed)
    renamed.rename(parts[0])
    other = tmp_path / "other"
    other.mkdir()
    for changes in ({"split.count": 0}, {"split.no": 7}, {"split.tensors.count": 99}):
        with pytest.raises(ConfigError, match="model-0000"):
            mlx_tq.load(split(path, other, 2, **changes)[0])


def test_a_number_for_each_layer_that_is_the_same_in_all(tmp_path):
    """As llama.cpp's converter writes it for some models."""
    keys = {"llama.attention.head_count_kv": [2, 2], "llama.feed_forward_length": [96, 96]}
    each, _ = mlx_tq.load(write_gguf(tmp_path / "each.gguf", keys=keys))
    all_, _ = mlx_tq.load(write_gguf(tmp_path / "all.gguf"))
    assert vars(each.args) == vars(all_.args)
