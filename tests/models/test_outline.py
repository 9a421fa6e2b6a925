"""A model without its weights takes the bytes that it takes when it is loaded, and its weights are not read."""

import json

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3
from mlx_lm.utils import quantize_model
from zoo import ARCHITECTURES, build

from mlx_tq.config import PROFILES
from mlx_tq.errors import ConfigError
from mlx_tq.integration.probe import model_facts
from mlx_tq.models import embedded_path, load, load_outline
from mlx_tq.prompt_cache.memory import capacities, context_limit, weights_nbytes

from .gguf_files import MODELS, write_gguf

QWEN3_4B = {
    "model_type": "qwen3", "hidden_size": 2560, "num_hidden_layers": 36, "intermediate_size": 9728,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6,
    "vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1e6, "tie_word_embeddings": True,
}  # fmt: skip

OPTIONS = [{}, {"dtype": "float16"}, {"dequantize": True}, {"dequantize": False}]


def bytes_of(model):
    profiles = {name: config for name, config in PROFILES.items() if name != "long"}  # which may be calibrated
    fitting = capacities(model, profiles, 10**7, contexts=[300, 512], streams=[1])
    return weights_nbytes(model), context_limit(model), fitting


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    "kind", ["Q4_0", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("F32", "F16", "Q5_0", "Q8_0"))]
)
def test_a_gguf_file(tmp_path, kind, options):
    path = write_gguf(tmp_path / "model.gguf", kind=kind)
    assert bytes_of(load_outline(path, **options)) == bytes_of(load(path, **options)[0])


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_architectures_of_gguf_files(tmp_path, name):
    path = write_gguf(tmp_path / "model.gguf", name)
    assert bytes_of(load_outline(path)) == bytes_of(load(path)[0])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("is_quantized", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_folder(tmp_path, is_quantized, options):
    model, config = build("llama"), ARCHITECTURES["llama"].config
    if is_quantized:
        model, config = quantize_model(model, config, group_size=32, bits=4)
    write_folder(tmp_path, model, config)
    assert bytes_of(load_outline(tmp_path, **options)) == bytes_of(with_tokenizer(tmp_path, **options))


def test_weights_that_would_take_half_of_the_memory_stay_packed(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", kind="Q4_0")
    dense = weights_nbytes(load_outline(path, dequantize=True))
    assert weights_nbytes(load_outline(path, memory=2 * dense)) == dense
    with pytest.warns(UserWarning, match=r"the weights stay packed, .* GB, more than half of .* --dequantize on makes"):
        packed = load_outline(path, memory=2 * dense - 1)
    assert bytes_of(packed) == bytes_of(load_outline(path, dequantize=False))


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next", "falcon_h1", "deepseek_v2", "minimax_m3_vl"])
def test_architectures(tmp_path, name):
    """Windows, states, mixtures of experts, heads with two sizes."""
    write_folder(tmp_path, build(name), ARCHITECTURES[name].config)
    assert bytes_of(load_outline(tmp_path)) == bytes_of(with_tokenizer(tmp_path))


def test_a_rope_inside_a_kernel_is_not_denied(tmp_path):
    write_folder(tmp_path, build("muse_spark"), ARCHITECTURES["muse_spark"].config)
    for slot in model_facts(load_outline(tmp_path)).slots:
        assert slot.no_rope.endswith("one inside a kernel is found only when the model is loaded")


def write_folder(folder, model, config):
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(config))


def with_tokenizer(folder, **options):
    """Load the model of a folder, with the tokenizer of the embedded model."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((embedded_path() / name).read_bytes())
    return load(folder, **options)[0]


def test_weights_are_not_read(tmp_path):
    """Of a model with 8 GB of weights, which the file lacks: their place is a hole."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    tensors, end = {}, 0
    for name, weight in tree_flatten(qwen3.Model(qwen3.ModelArgs.from_dict(QWEN3_4B)).parameters()):
        start, end = end, end + 2 * weight.size
        tensors[name] = {"dtype": "BF16", "shape": weight.shape, "data_offsets": [start, end]}
    header = json.dumps(tensors).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    weights, positions, fitting = bytes_of(load_outline(tmp_path))
    assert (weights, positions) == (end, 40960)
    assert mx.get_peak_memory() - before < 10**8
    off, safe = (next(each for each in fitting if each.profile == name) for name in ("off", "safe"))
    assert off.nbytes[512] == 512 * 36 * 8 * 2 * 128 * 2
    assert safe.nbytes[512] < off.nbytes[512]


def test_a_hostile_configuration_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_4B, "num_hidden_layers": 10**9}))
    with pytest.raises(ConfigError, match=r"its config\.json has num_hidden_layers = 1000000000, above 10,000"):
        load_outline(tmp_path)
