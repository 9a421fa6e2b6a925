"""`Endpoint`: a running server and the model that a client uses."""

import re
from dataclasses import dataclass
from typing import Any

from mlx_tq.cli.options import API_KEY_VARIABLE
from mlx_tq.errors import ConfigError, MlxTqError, one_line, unknown_name

_NAME = re.compile(r"[\w./:@+ -]{1,200}", re.ASCII)  # of a model, also where a shell reads it
NO_KEY = "none"  # clients insist on a key, and a server without one accepts any
ASSUMED_CONTEXT = 32_768  # tokens, where a model states no context length
_MAX_OUTPUT = 32_000
_OUTPUT_PART = 4  # this part of the context is for the answer: clients compact when the rest is full
_TIMEOUT_S = 10


@dataclass(frozen=True)
class Endpoint:
    url: str  # without /v1
    model: str
    context_length: int
    key: str | None
    scales_usage: bool = False  # whether it was started with the client's `server_flags`

    @property
    def api_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def output_tokens(self) -> int:
        """Return the tokens of an answer that a client may ask for."""
        return min(_MAX_OUTPUT, self.context_length // _OUTPUT_PART)


def find_endpoint(url: str, model: str | None, key: str | None) -> Endpoint:
    """Ask the server at `url` for `model`, by default its first, and for the context length."""
    url = url.rstrip("/").removesuffix("/v1")
    entries = {entry["id"]: entry for entry in _list_models(url, key) if "max_model_len" in entry}  # no embedders
    if not entries:
        raise ConfigError(f"{url} names no model with its context length, as mlx_tq.server does. Name another --url.")
    name = model or next(iter(entries))
    if name not in entries:
        raise unknown_name("--model", name, entries)
    context = entries[name]["max_model_len"]
    if not _NAME.fullmatch(name) or not isinstance(context, int | None):
        raise MlxTqError(
            f"the server at {url} describes its model in a way that no client takes: {one_line(name)[:80]!r}"
        )
    if context is None and not entries[name].get("loaded"):
        raise MlxTqError(f"the server at {url} has not loaded {name}. Try again when it has.")
    return Endpoint(url, name, context or ASSUMED_CONTEXT, key)


def _list_models(url: str, key: str | None) -> list[dict[str, Any]]:
    import httpx2  # a quarter of a second, which --help does without

    try:
        headers = authorization(key)
        response = httpx2.get(f"{url}/v1/models", headers=headers, timeout=_TIMEOUT_S, trust_env=False)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise ConfigError(
            f"no server answers at {url} ({one_line(error)}). Start one with mlx_tq.server --model MODEL, let --run "
            "start one, or name another --url."
        ) from error
    if response.status_code == httpx2.codes.UNAUTHORIZED:
        raise ConfigError(f"the server at {url} refuses the API key. Set {API_KEY_VARIABLE} to the key of the server.")
    try:
        models = response.json()["data"]
        return [dict(model) for model in models]
    except (ValueError, TypeError, LookupError) as error:
        raise ConfigError(
            f"{url} is not an mlx_tq.server: its /v1/models lists no models (status {response.status_code}). Name "
            "another --url."
        ) from error


def authorization(key: str | None) -> dict[str, str]:
    """Return the header with the key."""
    return {"Authorization": f"Bearer {key}"} if key else {}
