"""`Session`: a conversation over one cache: only new tokens are read, and evicted text comes back when it is needed."""

import secrets
import time
import uuid
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import mlx.core as mx
import numpy as np
from mlx_lm.generate import stream_generate
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache

from mlx_tq.config import DEFAULT_PROFILE, PROFILES, KVConfig, RescueConfig
from mlx_tq.errors import CacheFormatError, ConfigError
from mlx_tq.integration.probe import position_limit
from mlx_tq.models import ranks_of
from mlx_tq.prefix_cache.folder import Folder
from mlx_tq.prefix_cache.prefix_cache import PrefixCache, ReusedPrefix, open_folder, reuse_prefix
from mlx_tq.prompt_cache.build import build_caches
from mlx_tq.prompt_cache.compressed import compressed, plan_caches
from mlx_tq.prompt_cache.passes import cache_parts, compressed_caches
from mlx_tq.prompt_cache.plan import Plan
from mlx_tq.prompt_cache.recall import LONGEST_QUESTION
from mlx_tq.prompt_cache.statistics import cache_stats
from mlx_tq.rescue import AUTO, OFF, RescueClient, open_service
from mlx_tq.rescue.wire import Range
from mlx_tq.session.bring_back import Brought, bring_back, find, hold, read_document, tell_departed
from mlx_tq.session.files import SavedSession, load_session, save_session
from mlx_tq.session.looks import Looks
from mlx_tq.session.plain_text import PlainText, check_answer, check_text
from mlx_tq.session.prompt_length import PromptLengthLimit
from mlx_tq.session.recall import Recalled, archive_warning, live_positions, question_of, release
from mlx_tq.session.settings import check_settings
from mlx_tq.session.shadow import chosen_shadow, refuse_files, shadowed
from mlx_tq.session.statistics import SessionStats, TurnStats, turn_of
from mlx_tq.session.template import ChatFrame
from mlx_tq.session.transcript import Rehydration, Transcript, quotation_limit
from mlx_tq.session.worker import Worker, compute_weights

Progress = Callable[[int, int], None]
_NEARLY = 0.9  # of the model's positions
_LOAD_S = 60.0  # that loading waits for the rescue service
_STEP = 512  # tokens read at a time


class _Stopped(Exception):  # noqa: N818  not an error
    """Somebody called `stop` while the prompt was being read."""


class Session:
    """A conversation with a model.

    Any thread may call it, also each piece of an answer from another: it computes in a thread of its own.

    Args:
        model: of mlx-lm.
        tokenizer: of the model.
        config: how the cache is stored and evicted.
        rescue: "off", "auto", the URL of a rescue service, or all of it as a `RescueConfig`. Without it there is none,
            unless a conversation is loaded that had a service on this machine.
        system_prompt: that the conversation begins with.
        session_id: name of the conversation at the service. A conversation without a name of yours is forgotten there
            when it is closed, unless it was saved.
        max_tokens: of an answer; -1 for all that the model allows.
        sampler: of `mlx_lm.sample_utils.make_sampler`; greedy by default. It runs in a thread of the session, so
            arrays that it holds must be computed (`mx.eval`).
        seed: of what the sampler draws; another one each time without it.
        prefill_step_size: tokens read at a time; eviction happens between steps.
        template: options of the chat template.
        store: of prefixes, where a conversation's first prompt finds what was read before, and is kept: a folder,
            "auto" for one in the user's cache folder, "off", or a `Folder` with a limit.
        shadow: the model's own cache answers, and every so many tokens `shadow` compares the compressed one with it.
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
        rescue: str | RescueConfig | None = None,
        system_prompt: str | None = None,
        session_id: str | None = None,
        max_tokens: int = 512,
        sampler: Callable[..., Any] | None = None,
        seed: int | None = None,
        prefill_step_size: int = _STEP,
        template: dict[str, Any] | None = None,
        store: str | Folder | None = None,
        shadow: int | None = None,
        warn: Callable[[str], None] = warnings.warn,
    ) -> None:
        self.model, self.tokenizer, self.config = model, tokenizer, shadowed(config, shadow)
        self.rescue = rescue if isinstance(rescue, RescueConfig) else RescueConfig(service=rescue or OFF)
        self._may_choose_rescue = rescue is None
        self.max_tokens, self.sampler, self.prefill_step_size = max_tokens, sampler, prefill_step_size
        check_settings(system_prompt, session_id, max_tokens, sampler, seed, prefill_step_size)
        self.positions, self._ranks = position_limit(model), ranks_of(model)
        self.turns: list[TurnStats] = []
        self._warn = warn
        self._length_limit = PromptLengthLimit(tokenizer, self.positions)
        self._length_limit.check(len(system_prompt or ""), "system prompt")
        self._around = ChatFrame(tokenizer, system_prompt, template)
        self._plain = PlainText(tokenizer)
        self._keep = session_id is not None
        self._busy = self._stopping = self._closed = False
        self._warned: set[str] = set()
        compute_weights(model)
        self._worker = Worker()
        self._end_worker = weakref.finalize(self, self._worker.end)  # also where the program ends
        seed = secrets.randbits(63) if seed is None else seed
        self._worker.do(lambda: mx.random.seed(seed))
        self.plan = self._worker.do(lambda: self._planned(self.config))
        self._store_folder, self._shadow_every = open_folder(store, ranks=self._ranks), shadow
        self._store: PrefixCache | None = None
        self._client = _client(self.rescue)
        self._begin(session_id or uuid.uuid4().hex, self._worker.do(self._fresh_caches))

    def _planned(self, config: KVConfig) -> Plan | None:
        return None if config.is_off else plan_caches(self.model, config)

    def _begin(self, session_id: str, caches: list[Any]) -> None:
        self.session_id, self.cache = session_id, caches
        limit = quotation_limit(self.rescue, self.positions)
        self._asked: Range = (0, 0)  # where the last question is
        self._transcript = Transcript(self._plain, self._client, self.rescue, session_id, limit)

    def _fresh_caches(self) -> list[Any]:
        self.shadow = chosen_shadow(self.model, self.plan, self._shadow_every, stores=self._store_folder is not None)
        if self.shadow is not None:
            return self.shadow.caches
        return make_prompt_cache(self.model) if self.plan is None else build_caches(self.plan)

    # A turn.

    def respond(self, text: str, *, max_tokens: int | None = None, progress: Progress | None = None) -> Iterator[str]:
        """The answer to what the user says, piece by piece. Stop early by leaving the loop, or with `stop`.

        Args:
            text: what the user says.
            max_tokens: of this answer; by default those of the session.
            progress: told, in the session's thread, of the tokens read so far and of how many there are.

        Raises:
            ConfigError: `text` is no UTF-8 text, the conversation would exceed the model's positions, a turn is in
                progress, or the session is closed.
        """
        if self._closed:
            raise ConfigError("the session is closed; make a new one, and load what was saved of this.")
        check_text(text, "message")
        self._length_limit.check(len(text), "message", used=len(self._transcript.ids))
        max_tokens = self.max_tokens if max_tokens is None else max_tokens
        check_answer(max_tokens)
        self._check_idle()
        self._busy, self._stopping = True, False
        try:
            yield from self._worker.steps(self._answer(text, max_tokens, progress), self.stop)
        finally:
            self._busy = False
        self._tell()

    def _check_idle(self) -> None:
        if self._busy:
            raise ConfigError("a turn is in progress; read its answer to the end, or close it, before anything else.")

    def _answer(self, text: str, max_tokens: int, progress: Progress | None) -> Generator[str]:
        began = time.perf_counter()
        transcript, start, step = self._transcript, len(self._transcript.ids), self.prefill_step_size
        before = self._around.between(transcript.ids[-1]) if start else self._around.opening()
        message = [*before, *self._plain.encode(text), *self._around.closing()]
        room = self._room(len(message))
        self._ranks.check_equal("the tokens of the turn", np.array(message))
        document = self._ranks.broadcast(lambda: self._document(message))  # the first alone knows of a service
        turn, looks = TurnStats(len(message)), Looks(self.cache, Recalled())
        try:
            with ExitStack() as stack:
                stack.enter_context(compressed(self.model))
                stored = stack.enter_context(self._reading(message[: document or -1]))
                known, document = stored.restored, max(document, stored.restored)
                told = self._told(stored, known, len(message), progress)
                read_document(self.model, self.cache, transcript, message[:document], known, step, told)
                question, at = message[document:], 0 if document else len(before)
                brought = self._bring_back(text, question, at, room)
                quotation = brought.rehydration.ids
                question[at:at] = quotation
                looks = Looks(self.cache, brought.recalled, quoted=brought.rehydration.ranges)
                looks.begin()  # on the caches that the store may have given
                turn = turn_of(brought, document + len(question), known)
                told = self._told(stored, document, turn.prompt_tokens, progress)
                most = min(room - len(quotation), max_tokens if max_tokens >= 0 else room)
                for reply in stack.enter_context(closing(self._replies(question, most, told))):
                    if not turn.generation_tokens:
                        ttft = time.perf_counter() - began
                        rate = (turn.prompt_tokens - known) / ttft if document > known else reply.prompt_tps
                        turn = replace(turn, ttft=ttft, prompt_tps=rate)
                    transcript.read([reply.token])
                    tell_departed(transcript, self.cache)
                    looks.token()
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
            self._ranks.synchronize()
            looks.end()
            hold(self.cache, None)
            settled = self._settle(start, answered=turn.generation_tokens > 0)
            tell_departed(transcript, self.cache)  # of what was undone nothing is told to the service
            release(self.cache)
            if settled:
                self._asked = (start + len(before), start + turn.prompt_tokens - len(self._around.closing()))
                self.turns.append(turn.ended(looks, time.perf_counter() - began))

    def _document(self, message: list[int]) -> int:
        """Tokens of a long message that are read before its question, so that it can ask for what they push out."""
        returns = self.config.evict is not None and (self.config.evict.recalls or self._client is not None)
        whole = not returns or self.shadow is not None or len(message) <= LONGEST_QUESTION
        return 0 if whole else len(question_of(self.tokenizer, message)[0])

    def _bring_back(self, text: str, question: list[int], at: int, room: int) -> Brought:
        """Bring back what a question needs; a quotation is held, and is part of it from index `at` on."""
        transcript = self._transcript
        brought = bring_back(self.model, self.cache, transcript, text, question, self.prefill_step_size, room)
        quotation = brought.rehydration
        hold(self.cache, quotation.at(len(transcript.ids) + at))
        transcript.read([*question[:at], *quotation.ids, *question[at:]], quotation, at)
        return brought

    def rehydrate(self, query: str) -> Rehydration:
        """What of the evicted text a question needs, quoted. `respond` does this by itself."""
        return self._transcript.quoted(find(self.model, self._transcript, query, self._live()), self._live())

    def stop(self) -> None:
        """End the current answer after its next token; safe in a signal handler and from other threads."""
        self._stopping = True

    def _live(self) -> np.ndarray:
        """Positions that the cache still holds; where no layer is compressed, all."""
        return live_positions(self.cache, len(self._transcript.ids))

    def _told(self, stored: ReusedPrefix, known: int, whole: int, progress: Progress | None) -> Progress:
        """Is told of the tokens that were read behind those `known`, of a prompt of so many."""

        def told(done: int, _: int) -> None:
            stored.note(known + done)
            if self._stopping and known + done < whole:
                raise _Stopped
            if progress is not None:
                progress(known + done, whole)

        return told

    def _replies(self, ids: list[int], most: int, told: Progress) -> Generator[Any]:
        """What mlx-lm says of each token of the answer to `ids`, which are at the end of the transcript."""
        if self.shadow is not None:
            self.shadow.begin(ids[-1], len(self._transcript.ids) - 1)
        replies = stream_generate(
            self.model,
            self.tokenizer,
            ids,
            max_tokens=most,
            prompt_cache=self.cache,
            prefill_step_size=self.prefill_step_size,
            sampler=self.sampler,
            prompt_progress_callback=told,
        )
        for reply in replies:
            if self.shadow is not None:
                self.shadow.token(reply.token, reply.text, reply.logprobs)
            yield reply

    def _reading(self, ids: list[int]) -> AbstractContextManager[ReusedPrefix]:
        """With the store of prefixes, if there is one and the conversation begins."""
        store = None
        if self._store_folder is not None and self.plan is not None and not self._transcript.ids:
            store = self._store
            if store is None or store.plan is not self.plan:
                store = self._store = PrefixCache(self.model, self.plan, self._store_folder, self._warn_once)
        return reuse_prefix(store, self.cache, ids, self.prefill_step_size)

    def _room(self, tokens: int) -> int:
        """Positions that are left after `tokens` more."""
        if self.positions is None:
            return 2**31
        room = self.positions - len(self._transcript.ids) - tokens
        if room < 1:
            fits = max(0, tokens + room - 1)  # one is for the answer
            raise ConfigError(
                f"the conversation has {len(self._transcript.ids):,} tokens and this turn {tokens:,}; the model has "
                f"{self.positions:,} positions, which evicted tokens keep: {fits:,} tokens would fit. Shorten the "
                "turn, start a new conversation (reset), or take a model with a longer context."
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
        length = min([len(self._transcript.ids), *offsets])
        undone = not answered and can_trim_prompt_cache(self.cache) and self._trim(start)
        if undone:
            length = start
        elif any(offset != length for offset in offsets) and not self._trim(length):
            raise CacheFormatError(
                "the turn was interrupted where this model's cache cannot go back. Reset the session."
            )
        self._transcript.cut(length)
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
        said = len(self._transcript.ids)
        if self.positions is not None and said > _NEARLY * self.positions:
            self._warn_once(
                f"the conversation has {said:,} of the model's {self.positions:,} positions; it ends there, evicted "
                "tokens included."
            )
        recalls = self.config.evict is not None and self.config.evict.recalls
        evicted = said - len(self._live())
        if evicted and self._client is None and not recalls and self.shadow is None:
            self._warn_once(
                f"{evicted:,} tokens were evicted and are lost to the model. Recall and rescue bring "
                "back what a turn needs: choose --kv-recall auto, or --rescue auto."
            )
        warnings = (archive_warning(self.cache), self._client.take_warning() if self._client else None)
        for warning in filter(None, warnings):
            self._warn_once(warning)

    def _warn_once(self, message: str) -> None:
        subject = message.lstrip("0123456789,. ")[:20]
        if subject not in self._warned:
            self._warned.add(subject)
            self._warn(message)

    # The conversation.

    @property
    def ids(self) -> list[int]:
        """All tokens of the conversation by position, also those that left the cache."""
        return list(self._transcript.ids)

    @property
    def last_exchange(self) -> tuple[str, str] | None:
        """The last question and its answer, also of a loaded conversation; None where there is none."""
        start, stop = self._asked
        if not stop:
            return None
        ids = self._transcript.first_said(start, stop), self._transcript.ids[stop + len(self._around.closing()) :]
        question, answered = (self.tokenizer.decode(part, skip_special_tokens=True) for part in ids)
        return question, answered

    @property
    def client(self) -> RescueClient | None:
        """The client of the rescue service, or None without rescue."""
        return self._client

    @property
    def stats(self) -> SessionStats:
        """What the conversation takes."""
        cache = self._worker.do(lambda: cache_stats(self.cache, self.plan))
        tokens, live = len(self._transcript.ids), len(self._live())
        return SessionStats(
            turns=len(self.turns),
            tokens=tokens,
            live=live,
            recalled=len(self.turns[-1].recalled) if self.turns else 0,
            rescued=sum(stop - start for start, stop in self._transcript.copies),
            positions=self.positions,
            nbytes=cache.nbytes,
            fp16_nbytes=cache.fp16_nbytes,
            tiers=cache.tiers,
            rescue=self._client.stats if self._client else None,
        )

    def reset(self) -> None:
        """Begin anew; the service forgets the conversation. Raises ConfigError while a turn is in progress."""
        self._check_idle()
        self._forget()
        self.turns = []
        self._begin(uuid.uuid4().hex, self._worker.do(self._fresh_caches))

    def save(self, path: str | Path) -> None:
        """Write cache, tokens and name of the conversation to a .safetensors file.

        Raises:
            ConfigError: there is nothing to save, or a turn is in progress.
            CacheFormatError: the file cannot be written, or is there and no conversation.
        """
        self._check_idle()
        if not self._transcript.ids:
            raise ConfigError("there is nothing to save; say something first.")
        refuse_files(self.shadow)
        name = str(getattr(self.tokenizer, "name_or_path", ""))
        saved = SavedSession(
            self.session_id,
            self.cache,
            self.config,
            self._transcript.ids,
            self._transcript.copies,
            self.rescue,
            self._asked,
        )
        self._worker.do(lambda: save_session(path, saved, self.model, name))
        self._keep = True

    def load(self, path: str | Path) -> None:
        """Go on with a conversation that was saved, also by another process, as it was saved.

        The service gets its evicted text again; waits for that, but not forever.

        Raises:
            CacheFormatError: the file is damaged, or holds no conversation with this model.
            ConfigError: a turn is in progress.
        """
        self._check_idle()
        refuse_files(self.shadow)
        saved = self._worker.do(lambda: load_session(path, self.model))
        plan = self._worker.do(lambda: self._planned(saved.config))
        self._forget()
        self._take_rescue(saved.rescue)
        self.turns, self.config, self.plan, self._keep = [], saved.config, plan, True
        self._begin(saved.session_id, saved.caches)
        self._transcript.ids, self._transcript.copies = saved.ids, saved.copies
        self._asked = saved.asked
        gone = np.setdiff1d(np.arange(len(saved.ids)), self._live())
        self._transcript.tell(gone)  # to a service that may never have seen it
        if self._transcript.told and self._client is not None and not self._client.flush(_LOAD_S):
            self._warn_once(
                f"the rescue service has not taken all of the evicted text within {_LOAD_S:g} s; until it has, answers "
                "may miss some of it."
            )

    def _take_rescue(self, saved: RescueConfig) -> None:
        """Rescue as a conversation had it, where the session was not told; a file sends no text to other machines."""
        if not self._may_choose_rescue or self._client is not None or saved.service == OFF:
            return
        if saved.service != AUTO:
            self._warn_once(
                f"the conversation had rescue by {saved.service}, which a file cannot choose: it goes on without. Give "
                f"--rescue {saved.service} to go on with it."
            )
            return
        self.rescue, self._client = saved, _client(saved)

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
        if self._client is not None and self._transcript.told and not self._keep:
            self._client.forget(self.session_id)


def _client(rescue: RescueConfig) -> RescueClient | None:
    return None if rescue.service == OFF else RescueClient(open_service(rescue.service))
