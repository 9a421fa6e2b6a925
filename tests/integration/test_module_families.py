"""Families of models: mlx-vlm's is bound only once it is loaded, and to none of mlx-lm's models."""

import sys

import pytest
from zoo import build

import mlx_tq
from mlx_tq.integration.module_families import MLX_LM, MLX_VLM, family_of, language_model, loaded_families


def vlm_modules():
    return {name for name in sys.modules if name.partition(".")[0] == MLX_VLM.package}


@pytest.mark.parametrize("name", ["llama", "gemma3"])  # the second has a `language_model` inside
def test_a_model_of_mlx_lm_binds_only_mlx_lm(name):
    model, before = build(name), vlm_modules()
    with mlx_tq.compressed(model, profile="small"):
        pass
    assert vlm_modules() == before
    assert loaded_families() == ([MLX_LM, MLX_VLM] if before else [MLX_LM])
    assert family_of(model) is MLX_LM
    assert language_model(model) is model
