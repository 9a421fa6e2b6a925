"""The training code of the hybrid and the latent model: its mathematics, and that mlx-lm reads what it writes."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
torch = pytest.importorskip("torch", reason="the recipe trains with torch, which only the extra embed brings")


@pytest.mark.full
def test_the_chunked_delta_rule_is_the_recurrence():
    from benchmarks.models.hybrid import delta_rule

    rng = np.random.default_rng(0)
    T, D, Dv = 96, 8, 5
    q, k, v = (rng.standard_normal((T, size)) for size in (D, D, Dv))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    decay, beta = rng.uniform(0.3, 1, T), rng.uniform(0, 1, T)
    state, expected = np.zeros((D, Dv)), []
    for t in range(T):
        state = decay[t] * state
        state += np.outer(k[t], beta[t] * (v[t] - k[t] @ state))
        expected.append(q[t] @ state)
    parts = [torch.tensor(part)[None, None] for part in (q, k, v, np.log(decay), beta)]
    found = delta_rule(*parts)[0, 0].numpy()
    assert np.abs(found - np.array(expected)).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize(("kind", "expected_config"), [
    ("hybrid", {"model_type": "qwen3_next", "partial_rotary_factor": 0.25, "full_attention_interval": 4}),
    ("latent", {"model_type": "deepseek_v3", "kv_lora_rank": 128, "qk_rope_head_dim": 32}),
])  # fmt: skip
def test_mlx_lm_reads_the_export_and_predicts_the_same(kind, expected_config, tmp_path):
    import mlx.core as mx
    from mlx_lm import load

    from benchmarks.models.export import export
    from benchmarks.models.train import make_model
    from mlx_tq.models import embedded_path

    torch.manual_seed(1)
    model = make_model(kind, 4096)
    for parameter in model.parameters():  # trained weights are no ones and zeros
        parameter.data = (parameter + 0.1 * torch.randn_like(parameter)).bfloat16().float()
    torch.save({"model": model.state_dict()}, tmp_path / "state.pt")
    export(tmp_path / "state.pt", Path(embedded_path()), tmp_path / "model", positions=4096)
    loaded, _ = load(str(tmp_path / "model"))
    loaded.set_dtype(mx.float32)
    ids = np.random.default_rng(0).integers(3, 4096, (1, 96))
    with torch.no_grad():
        expected = model(torch.tensor(ids), dtype=torch.float32).numpy()
    found = np.array(loaded(mx.array(ids)))
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config.items() >= expected_config.items()


def test_facts_of_a_context_are_about_different_things():
    from benchmarks.models.facts import draw

    for seed in range(50):
        rng, used = random.Random(seed), set()
        facts = [fact for _ in range(16) if (fact := draw(rng, used)) is not None]
        assert len({fact.question for fact in facts}) == len(facts)
        assert all(fact.answer in fact.sentence for fact in facts)
