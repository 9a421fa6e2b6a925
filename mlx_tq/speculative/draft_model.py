"""`DraftModel`: drafts tokens with a smaller model."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import trim_prompt_cache

from mlx_tq.cache.layer import cache_parts
from mlx_tq.errors import ConfigError
from mlx_tq.integration.probe import position_limit
from mlx_tq.integration.rollback import RollbackWindow, draft_blocker, widen_windows
from mlx_tq.integration.speculative import check_rollback
from mlx_tq.prefix_cache.prefix_cache import common_prefix
from mlx_tq.speculative.draft_gate import MAX_ROWS

_STEP = 512  # tokens prefilled between two tokens of an answer


class DraftModel:
    """A smaller model with the caches of the conversation that it drafted for last, with which a later turn continues.

    It drafts its most likely tokens.
    """

    def __init__(self, model: Any, make_caches: Callable[[], list[Any]], num_drafted: int) -> None:
        self._model, self._make_caches, self.num_drafted = model, make_caches, num_drafted
        self._positions = position_limit(model)
        check_rollback(model, make_caches())
        self._caches: list[Any] = []  # made by the thread that runs the model
        self._held: list[int] = []  # tokens that the caches hold
        self._last: ModelDrafts | None = None  # for which the caches were used

    def check(self, model: Any, caches: list[Any]) -> None:
        """Raise ConfigError if a model's caches cannot drop rejected drafts."""
        reason = draft_blocker(model, caches)
        if reason is not None:
            raise ConfigError(f"the draft model cannot be used: {reason}. Drop the draft model.")

    def begin(self, model: Any, caches: list[Any], ids: Sequence[int]) -> "ModelDrafts":
        """Return the drafts for an answer to a conversation of tokens `ids`."""
        self.check(model, caches)
        return ModelDrafts(self, ids)

    def continuation(self, drafts: "ModelDrafts", count: int) -> list[int]:
        """Return `count` tokens after those of an answer; none while many of these still have to be prefilled."""
        if self._positions is not None and len(drafts) + count > self._positions:
            return []
        try:
            return self._continue(drafts, count)
        except BaseException:  # such as a memory error, after which the caches may hold other tokens
            self._caches, self._held, self._last = [], [], None
            raise

    def _continue(self, drafts: "ModelDrafts", count: int) -> list[int]:
        ids = drafts.ids
        agreed = min(drafts.num_held, len(ids) - 1) if self._last is drafts else 0
        self._last = drafts
        self._caches = self._caches or self._open_caches()
        self._trim_to(agreed + common_prefix(np.array(self._held[agreed:]), np.array(ids[agreed:-1])))
        unread = ids[len(self._held) :]
        if len(unread) > MAX_ROWS:
            step = unread[: min(_STEP, len(unread) - 1)]
            self._run(step)
            mx.eval([cache.state for cache in self._caches])  # without the logits
            drafts.num_held = len(self._held)
            unread = unread[len(step) :]
            if len(unread) > 1:
                return []
        logits = self._run(unread)
        drafts.num_held = len(self._held)
        drawn = [mx.argmax(logits[:, -1], axis=-1)]
        while len(drawn) < count:
            drawn.append(mx.argmax(self._model(drawn[-1][None], cache=self._caches)[:, -1], axis=-1))
        tokens: Any = mx.concatenate(drawn).tolist()
        self._held += tokens[:-1]
        return list(tokens)

    def _open_caches(self) -> list[Any]:
        caches = self._make_caches()
        widen_windows(caches, MAX_ROWS)
        return caches

    def _run(self, ids: list[int]) -> mx.array:
        logits: mx.array = self._model(mx.array([ids], mx.uint32), cache=self._caches)
        self._held += ids
        return logits

    def _trim_to(self, count: int) -> None:
        excess = len(self._held) - count
        if excess > MAX_ROWS and any(isinstance(part, RollbackWindow) for part in cache_parts(self._caches)):
            self._caches, count = self._open_caches(), 0
        elif excess:
            trim_prompt_cache(self._caches, excess)
        del self._held[count:]


class ModelDrafts:
    """The drafts of a `DraftModel` for one answer."""

    gate = None

    def __init__(self, source: DraftModel, ids: Sequence[int]) -> None:
        self.ids = list(ids)
        self.num_held = 0  # of these tokens, in the caches of the draft model unless another answer used it
        self._source = source

    def __len__(self) -> int:
        return len(self.ids)

    def append(self, token: int) -> None:
        """Add the next token of the conversation."""
        self.ids.append(token)

    @property
    def may_draft(self) -> bool:
        """Whether `draft` may return tokens after the next `append`."""
        return True

    def draft(self, limit: int) -> list[int]:
        """Return the tokens to verify after the last one, at most `limit`."""
        count = min(limit, self._source.num_drafted)
        return self._source.continuation(self, count) if count > 0 else []
