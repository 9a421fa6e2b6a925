"""/v1/embeddings with the openai client and a real rescue service."""

import asyncio

import numpy as np
import openai
import pytest
from rescue.harness import Server as RescueService

from mlx_tq.rescue import RescueClient, open_service
from mlx_tq.server.api_errors import UnavailableError
from mlx_tq.server.embeddings import embed, embedder_objects
from mlx_tq.server.schemas import EmbeddingRequest, parse
from rescue_svc.embed.hashing import HashingEmbedder

TEXTS = ["the access code is 481729", "rain in the mountains"]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    rescue_service = RescueService(tmp_path_factory.mktemp("rescue") / "data")
    yield rescue_service
    rescue_service.stop()


@pytest.fixture(scope="module")
def embedding(start, service):
    return start("--rescue", service.url)


@pytest.mark.parametrize("encoding", ["float", openai.NOT_GIVEN])
def test_vectors_equal_those_of_the_embedder(embedding, encoding):
    """For more texts than one call of the service accepts, as numbers and as base64."""
    texts = [f"{text} {n}" for n in range(20) for text in TEXTS]
    answer = embedding.openai.embeddings.create(model="hashing-1", input=texts, encoding_format=encoding)
    assert (answer.model, [entry.index for entry in answer.data]) == ("hashing-1", list(range(40)))
    vectors = np.array([entry.embedding for entry in answer.data])
    np.testing.assert_allclose(vectors, HashingEmbedder().embed(texts), atol=1e-6)
    one = embedding.openai.embeddings.create(model="default_model", input=texts[1], dimensions=384)
    np.testing.assert_allclose(one.data[0].embedding, vectors[1], atol=1e-6)


@pytest.mark.parametrize(
    ("body", "status", "param", "word"),
    [
        ({"input": [1, 2]}, 400, "input", "check_embedding_ctx_length=False"),
        ({"input": [[1, 2], [3]]}, 400, "input", "send strings"),
        ({"input": ""}, 400, "input", "at least 1"),
        ({"input": ["a", "b" * 8193]}, 400, "input.1", "8192"),
        ({"input": "a", "dimensions": 3}, 400, "dimensions", "384"),
        ({"input": "a", "model": "text-embedding-3-small"}, 404, "model", "hashing-1"),
    ],
)
def test_invalid_requests(embedding, body, status, param, word):
    response = embedding.post("/v1/embeddings", **body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param)
    assert word in error["message"]


def test_the_embedder_is_listed_as_a_model(embedding):
    models = embedding.openai.models.list().data
    assert [model.id for model in models] == ["needle32", "hashing-1"]
    assert embedding.openai.models.retrieve("hashing-1") == models[1]
    assert embedding.http.get("/v1/models").json()["data"][1] == {
        "id": "hashing-1", "object": "model", "created": models[0].created, "owned_by": "mlx_tq"
    }  # fmt: skip
    with pytest.raises(openai.NotFoundError):
        embedding.openai.models.retrieve("hashing-2")


def test_without_a_rescue_service(server):
    response = server.post("/v1/embeddings", input="a")
    assert (response.status_code, "--rescue auto" in response.text) == (404, True)


def test_a_service_without_an_embedder_or_that_has_ended(tmp_path):
    """The failures do not open the circuit breaker, which would stop retrieval."""
    plain = RescueService(tmp_path / "data", embedder="none")
    request = parse(EmbeddingRequest, b'{"input": "a"}')
    try:
        with RescueClient(open_service(plain.url)) as client:
            for _ in range(8):
                with pytest.raises(UnavailableError, match="no embedder"):
                    asyncio.run(embed(request, client, "default_model"))
            assert asyncio.run(embedder_objects(client, 0)) == []
            plain.stop()
            assert asyncio.run(embedder_objects(client, 0)) == []
            with pytest.raises(UnavailableError, match="cannot be reached"):
                asyncio.run(embed(request, client, "default_model"))
    finally:
        plain.stop()
