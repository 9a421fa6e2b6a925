"""A conversation in a file: a prompt cache whose metadata holds the tokens and the name of the session."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from mlx_tq.cache.factory import cache_parts
from mlx_tq.cache.persist import load_prompt_cache, save_prompt_cache
from mlx_tq.config import KVConfig
from mlx_tq.errors import CacheFormatError
from mlx_tq.rescue.wire import Range

_KEY = "session"


class ModelName(NamedTuple):
    """fingerprint: of the weights, checked on load. name: for messages."""

    fingerprint: str
    name: str


class SavedSession(NamedTuple):
    """A conversation: name at the rescue service, cache, all tokens by position, and which of them repeat others."""

    session_id: str
    caches: list[Any]
    config: KVConfig
    ids: list[int]
    copies: list[Range]


def save_session(path: str | Path, session: SavedSession, model: ModelName) -> None:
    """Write a conversation.

    Raises:
        CacheFormatError: the file cannot be written.
    """
    about = {"id": session.session_id, "ids": session.ids, "copies": session.copies}
    metadata = {"model": model.name, _KEY: json.dumps(about)}
    save_prompt_cache(path, session.caches, model=model.fingerprint, config=session.config, metadata=metadata)


def load_session(path: str | Path, fingerprint: str) -> SavedSession:
    """Read a conversation with the model of this fingerprint.

    Raises:
        CacheFormatError: no such file, a damaged one, of another model, or a prompt cache without a conversation.
    """
    if not Path(path).is_file():
        raise CacheFormatError(f"there is no conversation {path}. /save of mlx_tq.chat and Session.save write them.")
    loaded = load_prompt_cache(path, model=fingerprint)
    if _KEY not in loaded.metadata:
        raise CacheFormatError(f"{path} is a prompt cache, not a conversation. Take it for mlx_tq.generate.")
    about = json.loads(loaded.metadata[_KEY])
    copies = [(start, stop) for start, stop in about["copies"]]
    lengths = {part.offset for part in cache_parts(loaded.caches) if hasattr(part, "offset")}
    if lengths - {len(about["ids"])}:
        raise CacheFormatError(f"{path} holds {len(about['ids'])} tokens and a cache of {lengths}; it is damaged.")
    return SavedSession(about["id"], loaded.caches, loaded.config, about["ids"], copies)
