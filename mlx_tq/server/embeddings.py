"""/v1/embeddings, computed by the embedder of the rescue service."""

import base64
from typing import Any

import numpy as np
from starlette.concurrency import run_in_threadpool

from mlx_tq.errors import RescueError
from mlx_tq.rescue import RescueClient
from mlx_tq.server.api_errors import InvalidRequestError, ModelNotFoundError, UnavailableError
from mlx_tq.server.schemas import EmbeddingRequest

_BATCH = 32  # texts of a call; a longer call would delay other users of the service


async def embedder_objects(client: RescueClient | None, created: int) -> list[dict[str, Any]]:
    """Return the embedder as a model in OpenAI's shape; an empty list while no embedder is known."""
    name = None if client is None else await run_in_threadpool(client.embedder)
    return [] if name is None else [{"id": name, "object": "model", "created": created, "owned_by": "mlx_tq"}]


async def embed(request: EmbeddingRequest, client: RescueClient | None, default_model: str) -> dict[str, Any]:
    """Return the embeddings in OpenAI's shape; `default_model` is a name that stands for any embedder."""
    if client is None:
        message = "embeddings need the rescue service; start this server with --rescue auto"
        raise InvalidRequestError(message, status=404)
    texts = [request.input] if isinstance(request.input, str) else request.input
    vectors: list[list[float]] = []
    try:
        for start in range(0, len(texts), _BATCH):
            model, batch = await run_in_threadpool(client.embed, texts[start : start + _BATCH])
            dimensions = len(batch[0])
            if request.model not in (None, default_model, model):
                raise ModelNotFoundError(f"the embedder is {model}, not {request.model[:100]!r}", "model")
            if request.dimensions not in (None, dimensions):
                raise InvalidRequestError(f"the embedder's vectors have {dimensions} dimensions", "dimensions")
            vectors += batch
    except RescueError as error:
        raise UnavailableError(f"embeddings are unavailable: {error}; run `mlx-tq-rescue doctor`") from error
    embeddings: list[Any] = vectors
    if request.encoding_format == "base64":
        embeddings = [base64.b64encode(np.array(vector, "<f4").tobytes()).decode() for vector in vectors]
    data = [{"object": "embedding", "index": n, "embedding": embedding} for n, embedding in enumerate(embeddings)]
    usage = {"prompt_tokens": 0, "total_tokens": 0}  # the embedder does not count
    return {"object": "list", "data": data, "model": model, "usage": usage}
