"""A conversation in a file: a prompt cache whose metadata holds the tokens and the name of the session."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from mlx_tq.cache.files import CONVERSATION
from mlx_tq.config import KVConfig, RescueConfig
from mlx_tq.errors import CacheFormatError
from mlx_tq.prompt_cache.files import load_prompt_cache, save_prompt_cache
from mlx_tq.prompt_cache.passes import cache_parts
from mlx_tq.rescue.wire import Range


class SavedSession(NamedTuple):
    """A conversation.

    Attributes:
        session_id: its name at the rescue service.
        caches, config: its prompt cache, and how that is stored.
        ids: all tokens by position.
        copies: which of them repeat others.
        rescue: how evicted text comes back.
        asked: where the last question is; (0, 0) for none.
    """

    session_id: str
    caches: list[Any]
    config: KVConfig
    ids: list[int]
    copies: list[Range]
    rescue: RescueConfig
    asked: Range


def save_session(path: str | Path, session: SavedSession, model: Any, name: str) -> None:
    """Write a conversation with `model`, called `name` in messages; of existing files only another one is replaced.

    Raises:
        CacheFormatError: the file cannot be written, or is no conversation.
    """
    about = {
        "id": session.session_id,
        "ids": session.ids,
        "copies": session.copies,
        "rescue": asdict(session.rescue),
        "asked": session.asked,
    }
    metadata = {"model": name, CONVERSATION: json.dumps(about)}
    save_prompt_cache(path, session.caches, model=model, config=session.config, metadata=metadata)


def load_session(path: str | Path, model: Any) -> SavedSession:
    """Read a conversation with `model`.

    Raises:
        CacheFormatError: no such file, a damaged one, of another model, or a prompt cache without a conversation.
    """
    if not Path(path).is_file():
        raise CacheFormatError(f"there is no conversation {path}. /save of mlx_tq.chat and Session.save write them.")
    loaded = load_prompt_cache(path, model=model)
    if CONVERSATION not in loaded.metadata:
        raise CacheFormatError(f"{path} is a prompt cache, not a conversation. Take it for mlx_tq.generate.")
    about = json.loads(loaded.metadata[CONVERSATION])
    copies = [(start, stop) for start, stop in about["copies"]]
    lengths = {part.offset for part in cache_parts(loaded.caches) if hasattr(part, "offset")}
    if lengths - {len(about["ids"])}:
        raise CacheFormatError(f"{path} holds {len(about['ids'])} tokens and a cache of {lengths}; it is damaged.")
    rescue = RescueConfig(**about.get("rescue", {}))  # files of before have neither
    start, stop = about.get("asked", (0, 0))
    return SavedSession(about["id"], loaded.caches, loaded.config, about["ids"], copies, rescue, (start, stop))
