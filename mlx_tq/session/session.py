"""`Session`: a conversation over one cache: only new tokens are read, and evicted text comes back when it is needed."""

import time
import uuid
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from mlx_lm.generate import stream_generate
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache

from mlx_tq.cache.evicting import EvictingKVCache
from mlx_tq.cache.factory import build_caches, cache_parts, compressed_caches
from mlx_tq.config import DEFAULT_PROFILE, PROFILES, KVConfig, RescueConfig
from mlx_tq.dispatch import attention, plan_caches
from mlx_tq.errors import CacheFormatError, ConfigError
from mlx_tq.evict.selection import Span
from mlx_tq.models import fingerprint
from mlx_tq.probe import position_limit
from mlx_tq.rescue import OFF, RescueClient, open_service
from mlx_tq.session.files import ModelName, SavedSession, load_session, save_session
from mlx_tq.session.memory import NOTHING, Memory, Rehydration, quotation_limit
from mlx_tq.session.plain import PlainText, check_text
from mlx_tq.session.records import SessionStats, Turn
from mlx_tq.session.turns import Turns
from mlx_tq.stats import cache_stats

_NEARLY = 0.9  # of the model's positions
_STEP = 512  # tokens read at a time


class _Stopped(Exception):  # noqa: N818  not an error
    """Somebody called `stop` while the prompt was being read."""


class Session:
    """A conversation with a model.

    Args:
        model: of mlx-lm.
        tokenizer: of the model.
        config: how the cache is stored and evicted.
        rescue: "off", "auto", the URL of a rescue service, or all of it as a `RescueConfig`.
        system_prompt: that the conversation begins with.
        session_id: name of the conversation at the service. A conversation without a name of yours is forgotten there
            when it is closed, unless it was saved.
        max_tokens: of an answer; -1 for all that the model allows.
        sampler: of `mlx_lm.sample_utils.make_sampler`; greedy by default.
        prefill_step_size: tokens read at a time; eviction happens between steps.
        template: options of the chat template.
        warn: told what a user should know.

    Raises:
        ConfigError: a setting that cannot be met.
        UnsupportedModelError: the model cannot run on such a cache.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        config: KVConfig = PROFILES[DEFAULT_PROFILE],
        *,
        rescue: str | RescueConfig = OFF,
        system_prompt: str | None = None,
        session_id: str | None = None,
        max_tokens: int = 512,
        sampler: Callable[..., Any] | None = None,
        prefill_step_size: int = _STEP,
        template: dict[str, Any] | None = None,
        warn: Callable[[str], None] = warnings.warn,
    ) -> None:
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.rescue = rescue if isinstance(rescue, RescueConfig) else RescueConfig(service=rescue)
        self.max_tokens, self.sampler, self.prefill_step_size = max_tokens, sampler, prefill_step_size
        _check_answer(max_tokens)
        if system_prompt is not None:
            check_text(system_prompt, "system prompt")
        self.positions = position_limit(model)
        self.turns: list[Turn] = []
        self._warn = warn
        self._around = Turns(tokenizer, system_prompt, template)
        self._plain = PlainText(tokenizer)
        self._keep = session_id is not None
        self._busy = self._stopping = self._closed = False
        self._warned: set[str] = set()
        self.plan = None if config.is_off else plan_caches(model, config)
        self._client: RescueClient | None = None
        if self.rescue.service != OFF:
            self._client = RescueClient(open_service(self.rescue.service))
        self._begin(session_id or uuid.uuid4().hex, self._fresh_caches())

    def _begin(self, session_id: str, caches: list[Any]) -> None:
        self.session_id, self.cache = session_id, caches
        limit = quotation_limit(self.rescue, self.positions)
        self._memory = Memory(self._plain, self._client, self.rescue, session_id, limit)
        self._evicting = next(
            (cache for cache in compressed_caches(caches) if isinstance(cache, EvictingKVCache)), None
        )
        if self._evicting is not None:
            self._evicting.subscribe(self._memory.note)

    def _fresh_caches(self) -> list[Any]:
        return make_prompt_cache(self.model) if self.plan is None else build_caches(self.plan)

    # A turn.

    def respond(self, text: str, *, max_tokens: int | None = None) -> Iterator[str]:
        """The answer to what the user says, piece by piece. Stop early by leaving the loop, or with `stop`.

        Args:
            text: what the user says.
            max_tokens: of this answer; by default those of the session.

        Raises:
            ConfigError: `text` is no UTF-8 text, the conversation would exceed the model's positions, a turn is in
                progress, or the session is closed.
        """
        if self._closed:
            raise ConfigError("the session is closed; make a new one, and load what was saved of this.")
        check_text(text, "message")
        max_tokens = self.max_tokens if max_tokens is None else max_tokens
        _check_answer(max_tokens)
        if self._busy:
            raise ConfigError("a turn is in progress; read its answer to the end, or close it, before the next.")
        self._busy, self._stopping = True, False
        try:
            yield from self._answer(text, max_tokens)
        finally:
            self._busy = False
        self._tell()

    def _answer(self, text: str, max_tokens: int) -> Iterator[str]:
        began = time.perf_counter()
        rehydration = self.rehydrate(text)
        rescue_seconds = time.perf_counter() - began
        memory = self._memory
        before = self._around.between(memory.ids[-1]) if memory.ids else self._around.opening()
        after = [*self._plain.encode(text), *self._around.closing()]
        room = self._room(len(before) + len(after))
        if len(rehydration.ids) >= room:
            rehydration = NOTHING
        ids = [*before, *rehydration.ids, *after]
        start = len(memory.ids)
        memory.read(ids, rehydration, len(before))
        room -= len(rehydration.ids)
        most = room if max_tokens < 0 else min(max_tokens, room)
        self._hold(rehydration, start + len(before))
        turn = Turn(len(ids), rehydration=rehydration, rescue_seconds=rescue_seconds)
        try:
            with closing(self._generate(ids, most)) as replies:
                for reply in replies:
                    if not turn.generation_tokens:
                        turn = replace(turn, ttft=time.perf_counter() - began, prompt_tps=reply.prompt_tps)
                    memory.read([reply.token])
                    memory.write()
                    turn = replace(
                        turn,
                        generation_tokens=reply.generation_tokens,
                        generation_tps=reply.generation_tps,
                        finish_reason=reply.finish_reason or "interrupted",
                    )
                    yield reply.text
                    if self._stopping:
                        break
            for cache in compressed_caches(self.cache):
                cache.check_health()
        except _Stopped:
            pass
        finally:
            self._hold(NOTHING)
            if self._settle(start, answered=turn.generation_tokens > 0):
                self.turns.append(replace(turn, seconds=time.perf_counter() - began))

    def rehydrate(self, query: str) -> Rehydration:
        """What of the evicted text a question needs, quoted. `respond` does this by itself."""
        return self._memory.recall(query, self._live())

    def stop(self) -> None:
        """End the current answer after its next token; safe in a signal handler and from other threads."""
        self._stopping = True

    def _live(self) -> Sequence[int]:
        """Positions that the cache still holds; where no layer is compressed, all."""
        compressed = compressed_caches(self.cache)
        return compressed[0].positions if compressed else range(len(self._memory.ids))

    def _hold(self, rehydration: Rehydration, start: int = 0) -> None:
        """Keep the quotation at position `start` in the cache, or none any more."""
        if self._evicting is not None:
            self._evicting.hold(Span(start, start + len(rehydration.ids)) if rehydration.ids else None)

    def _generate(self, ids: list[int], most: int) -> Generator[Any]:
        def progress(processed: int, total: int) -> None:
            if self._stopping and processed < total:
                raise _Stopped

        with attention(self.model):
            yield from stream_generate(
                self.model,
                self.tokenizer,
                ids,
                max_tokens=most,
                prompt_cache=self.cache,
                prefill_step_size=self.prefill_step_size,
                sampler=self.sampler,
                prompt_progress_callback=progress,
            )

    def _room(self, tokens: int) -> int:
        """Positions that are left after `tokens` more."""
        if self.positions is None:
            return 2**31
        room = self.positions - len(self._memory.ids) - tokens
        if room < 1:
            raise ConfigError(
                f"the conversation has {len(self._memory.ids):,} tokens and this turn {tokens:,}; the model has "
                f"{self.positions:,} positions, which evicted tokens keep. Start a new conversation (reset), or take a "
                "model with a longer context."
            )
        return room

    def _settle(self, start: int, *, answered: bool) -> bool:
        """Make cache and tokens agree again after an interruption; False for a turn that was undone.

        It is where nothing was answered, if it can be.

        Ctrl-C may come in the middle of a forward pass, when some layers have a token that others have not.
        """
        if not answered and not start:  # the buffers go too
            self._begin(self.session_id, self._fresh_caches())
            return False
        offsets = [part.offset for part in cache_parts(self.cache) if hasattr(part, "offset")]
        length = min([len(self._memory.ids), *offsets])
        undone = not answered and can_trim_prompt_cache(self.cache) and self._trim(start)
        if undone:
            length = start
        elif any(offset != length for offset in offsets) and not self._trim(length):
            raise CacheFormatError(
                "the turn was interrupted where this model's cache cannot go back. Reset the session."
            )
        self._memory.cut(length)
        return not undone

    def _trim(self, length: int) -> bool:
        """Take the caches back to `length` tokens, if all can."""
        parts = [part for part in cache_parts(self.cache) if hasattr(part, "offset")]
        with suppress(CacheFormatError):
            for part in parts:
                part.trim(part.offset - length)
        return all(part.offset == length for part in parts)

    def _tell(self) -> None:
        """Warn once of each thing that is worth it."""
        told = len(self._memory.ids)
        if self.positions is not None and told > _NEARLY * self.positions:
            self._warn_once(
                f"the conversation has {told:,} of the model's {self.positions:,} positions; it ends there, evicted "
                "tokens included."
            )
        if self._memory.evicted and self._client is None:
            self._warn_once(
                f"{self._memory.evicted:,} tokens were evicted and are lost to the model. Rescue brings back what a "
                "turn needs: choose --rescue auto."
            )
        warning = self._client.take_warning() if self._client else None
        if warning:
            self._warn_once(warning)

    def _warn_once(self, message: str) -> None:
        subject = message.lstrip("0123456789,. ")[:20]
        if subject not in self._warned:
            self._warned.add(subject)
            self._warn(message)

    # The conversation.

    @property
    def ids(self) -> list[int]:
        """All tokens of the conversation by position, evicted ones too."""
        return list(self._memory.ids)

    @property
    def client(self) -> RescueClient | None:
        """Of the rescue service."""
        return self._client

    @property
    def stats(self) -> SessionStats:
        """What the conversation takes."""
        cache = cache_stats(self.cache, self.plan)
        tokens = len(self._memory.ids)
        return SessionStats(
            turns=len(self.turns),
            tokens=tokens,
            live=len(self._live()),
            evicted=self._memory.evicted,
            rescued=sum(stop - start for start, stop in self._memory.copies),
            positions=self.positions,
            nbytes=cache.nbytes,
            fp16_nbytes=cache.fp16_nbytes,
            rescue=self._client.stats if self._client else None,
        )

    def reset(self) -> None:
        """Begin anew; the service forgets the conversation."""
        self._forget()
        self.turns = []
        self._begin(uuid.uuid4().hex, self._fresh_caches())

    def save(self, path: str | Path) -> None:
        """Write cache, tokens and name of the conversation to a .safetensors file.

        Raises:
            ConfigError: there is nothing to save.
            CacheFormatError: the file cannot be written.
        """
        if not self._memory.ids:
            raise ConfigError("there is nothing to save; say something first.")
        model = ModelName(fingerprint(self.model), str(getattr(self.tokenizer, "name_or_path", "")))
        saved = SavedSession(self.session_id, self.cache, self.config, self._memory.ids, self._memory.copies)
        save_session(path, saved, model)
        self._keep = True

    def load(self, path: str | Path) -> None:
        """Go on with a conversation that was saved, also by another process; the service gets its evicted text again.

        Raises:
            CacheFormatError: the file is damaged, or holds no conversation with this model.
        """
        saved = load_session(path, fingerprint(self.model))
        plan = None if saved.config.is_off else plan_caches(self.model, saved.config)
        self._forget()
        self.turns, self.config, self.plan, self._keep = [], saved.config, plan, True
        self._begin(saved.session_id, saved.caches)
        self._memory.ids, self._memory.copies = saved.ids, saved.copies
        self._memory.rewrite(self._live())

    def close(self) -> None:
        """End the conversation; the service forgets it unless it was saved or named."""
        self._closed = True
        if self._client is not None:
            self._forget()
            self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _forget(self) -> None:
        if self._client is not None and self._memory.evicted and not self._keep:
            self._client.forget(self.session_id)


def _check_answer(max_tokens: int) -> None:
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or (max_tokens < 1 and max_tokens != -1):
        raise ConfigError(f"max_tokens is {max_tokens!r}; it must be 1 or more, or -1 for all that the model allows.")
