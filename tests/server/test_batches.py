"""Answers that run together are those that the model gives alone, also of architectures that mlx-lm batches wrongly."""

from dataclasses import replace

import mlx.core as mx
import pytest
from cli.tools import zoo_model
from mlx_lm.generate import generate_step

from mlx_tq.config import PROFILES, EvictConfig, KVConfig
from mlx_tq.models import load
from mlx_tq.prompt_cache.compressed import compressed, make_prompt_cache

from .harness import running, together

TOKENS = 12
PROMPTS = ["The garden", "Nine boats and a lamp went over the hill, as " * 12, "Which house has seven trees? " * 5]
ONE_AT_A_TIME, UNPADDED = "answers run one at a time", "prompts of different lengths are not prefilled together"
SAYS = {"llama4": ONE_AT_A_TIME, "gpt_bigcode": ONE_AT_A_TIME, "afm7": ONE_AT_A_TIME}
SAYS |= dict.fromkeys(("deepseek_v41", "gemma2", "internlm3", "mistral3", "minimax_m3_vl"), ONE_AT_A_TIME)
SAYS |= dict.fromkeys(("jamba", "bailing_moe_linear", "nemotron_h", "mamba"), UNPADDED)


SERVED_ALONE = ("afm7", "gpt_bigcode", "internlm3", "mistral3", "minimax_m3_vl")


def alone(folder, config):
    """Return the answer to each prompt in this process."""
    model, tokenizer = load(folder)
    texts = []
    with compressed(model, config):
        for prompt in PROMPTS:
            caches, ids = make_prompt_cache(model, config), mx.array(tokenizer.encode(prompt))
            tokens = [token for token, _ in generate_step(ids, model, max_tokens=TOKENS, prompt_cache=caches)]
            ends = [at for at, token in enumerate(tokens) if token in tokenizer.eos_token_ids]
            texts.append(tokenizer.decode(tokens[: min(ends, default=TOKENS)]).lstrip())
    return texts


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about the configuration of llama4
@pytest.mark.parametrize(
    ("name", "profile"),
    [
        *((name, "off") for name in SAYS if name != "mistral3"),
        *((name, "balanced") for name in ("llama4", "bailing_moe_linear", *SERVED_ALONE)),
    ],
)
@pytest.mark.full
def test_answers_together_are_those_alone(tmp_path, name, profile):
    folder, log = zoo_model(tmp_path / name, name, spread=True), tmp_path / "log"
    flags = ("--kv-profile", profile, "--prefill-step-size", 2048)
    with running(folder, log, *flags) as server:
        body = {"max_tokens": TOKENS, "temperature": 0}
        answers = together(
            [lambda prompt=prompt: server.post("/v1/completions", prompt=prompt, **body) for prompt in PROMPTS]
        )
        both = server.post("/v1/completions", prompt=PROMPTS[1], n=2, **body).json()
    assert all(answer.status_code == 200 for answer in answers), answers[0].text
    assert SAYS[name] in log.read_text()
    expected = alone(folder, PROFILES[profile])
    assert [answer.json()["choices"][0]["text"].lstrip() for answer in answers] == expected
    assert [choice["text"].lstrip() for choice in both["choices"]] == [expected[1]] * 2


@pytest.mark.full
@pytest.mark.parametrize(("name", "evict"), [("deepseek_v3", ""), ("deepseek_v3", "recency"), ("deepseek_v32", "")])
def test_batched_latents_equal_single_requests(tmp_path, name, evict):
    folder, log = zoo_model(tmp_path / name, name, spread=True), tmp_path / "log"
    flags = ["--kv-profile", "small", "--kv-sinks", 16, "--kv-window", 32, "--prefill-step-size", 2048]
    config = KVConfig.from_profile("small", sinks=16, window=32)
    if evict:
        flags += ["--kv-evict", evict, "--kv-budget", 80, "--kv-recall", "off"]
        config = replace(config, evict=EvictConfig(evict, 80, recall="off"))
    with running(folder, log, *flags) as server:
        body = {"max_tokens": TOKENS, "temperature": 0}
        answers = together(
            [lambda prompt=prompt: server.post("/v1/completions", prompt=prompt, **body) for prompt in PROMPTS]
        )
    assert [answer.json()["choices"][0]["text"].lstrip() for answer in answers] == alone(folder, config)
    assert (ONE_AT_A_TIME in log.read_text()) == (name == "deepseek_v32")
