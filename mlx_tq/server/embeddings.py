"""/v1/embeddings, by the embedder of the rescue service."""

import base64
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, field_validator
from starlette.concurrency import run_in_threadpool

from mlx_tq.errors import RescueError
from mlx_tq.rescue import MAX_TEXT, RescueClient
from mlx_tq.server.errors import InvalidRequestError, ModelNotFoundError, NotFoundError, UnavailableError
from mlx_tq.server.schemas import Count, FailFastList, Strict

_BATCH = 32  # texts of a call; a longer one would keep what is written for other users waiting

Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]


class EmbeddingRequest(Strict):
    """The body of a request to /v1/embeddings."""

    model: str | None = None
    input: Text | Annotated[FailFastList[Text], Field(min_length=1, max_length=2048)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    user: Any = None

    @field_validator("input", mode="before")
    @classmethod
    def _is_text(cls, asked: Any) -> Any:
        if isinstance(asked, list) and any(isinstance(part, (int, list)) for part in asked):
            raise ValueError("tokens are of another model than the embedder; send texts")
        return asked


async def embed(request: EmbeddingRequest, client: RescueClient | None, default: str) -> dict[str, Any]:
    """The vectors of texts, as OpenAI shows them.

    Args:
        request: the texts.
        client: of the rescue service; None where there is none.
        default: a name that stands for any model.

    Raises:
        NotFoundError: there is no rescue service.
        UnavailableError: it cannot be reached, or has no embedder.
        ModelNotFoundError: another embedder is asked for than the one there is.
        InvalidRequestError: another length of vectors.
    """
    if client is None:
        raise NotFoundError("embeddings are made by the rescue service; start this server with --rescue auto")
    texts = [request.input] if isinstance(request.input, str) else request.input
    vectors: list[list[float]] = []
    try:
        for start in range(0, len(texts), _BATCH):
            model, found = await run_in_threadpool(client.embed, texts[start : start + _BATCH])
            _check(request, model, len(found[0]), default)
            vectors += found
    except RescueError as error:
        raise UnavailableError(f"there are no embeddings: {error}; `mlx-tq-rescue doctor` says what helps") from error
    data = [
        {"object": "embedding", "index": place, "embedding": _shown(vector, request.encoding_format)}
        for place, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": 0, "total_tokens": 0}  # the embedder does not count
    return {"object": "list", "data": data, "model": model, "usage": usage}


def _check(request: EmbeddingRequest, model: str, dimensions: int, default: str) -> None:
    if request.model not in (None, default, model):
        raise ModelNotFoundError(f"the embedder is {model}, not {request.model[:100]!r}", "model")
    if request.dimensions not in (None, dimensions):
        raise InvalidRequestError(f"the embedder's vectors have {dimensions} dimensions", "dimensions")


def _shown(vector: list[float], encoding: str | None) -> Any:
    if encoding == "base64":
        return base64.b64encode(np.array(vector, "<f4").tobytes()).decode()
    return vector
