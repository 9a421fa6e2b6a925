"""`Session`: a conversation over one cache, in which evicted context is recalled when a turn needs it."""

import os
import secrets
import uuid
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any, Self

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlx_tq.cache.recurrent_states import DEFAULT_STATES, StateStorage
from mlx_tq.config import DEFAULT_PROFILE, PROFILES, KVConfig, RescueConfig
from mlx_tq.errors import CacheFormatError, ConfigError, unknown_name
from mlx_tq.integration.probe import check_token_ids, position_limit
from mlx_tq.models import ranks_of
from mlx_tq.prefix_cache.folder import Folder, open_folder
from mlx_tq.prefix_cache.prefix_cache import PrefixCache
from mlx_tq.prompt_cache.build import build_caches
from mlx_tq.prompt_cache.cache_file import CONVERSATION, load_prompt_cache, refuse_damaged, save_prompt_cache
from mlx_tq.prompt_cache.compressed import compressed_attention, plan_caches, warn_uncalibrated
from mlx_tq.prompt_cache.layer_group import cache_offsets
from mlx_tq.prompt_cache.memory import choose_state_storage
from mlx_tq.prompt_cache.plan import Plan
from mlx_tq.prompt_cache.recall import MAX_QUESTION
from mlx_tq.prompt_cache.statistics import CacheStats, cache_stats
from mlx_tq.rescue import AUTO, OFF, open_client
from mlx_tq.session.compaction import compact_prompt_cache
from mlx_tq.session.restore import ProgressCallback, live_positions, prefill, take_archive_warning
from mlx_tq.session.saved_conversation import SavedConversation
from mlx_tq.session.shadow_mode import make_shadow
from mlx_tq.session.state_history import StateHistory
from mlx_tq.session.text import SESSION_ID, PlainText, PromptLengthLimit, TurnTemplate, check_max_tokens, check_text
from mlx_tq.session.transcript import Quotation, Transcript, TurnRange, quotation_limit
from mlx_tq.session.turn import UNLIMITED, StoppedError, Turn, TurnStats, roll_back, search_evicted
from mlx_tq.session.worker import Worker
from mlx_tq.speculative.lookup_mode import ON, LookupMode

_NEARLY_FULL = 0.9  # of the context
ON_FULL = STOP, DROP_OLDEST = "stop", "drop-oldest"  # when the context is full
_ANSWER_SHARE = 4  # an answer reserves at most this part of the context
_FLUSH_S = 60.0  # that `load` waits for the rescue service


class Session:
    """A conversation with a model.

    Any thread may call a session, and each piece of an answer may go to another thread. A session computes in a thread
    of its own.

    Args:
        model: a model of mlx-lm.
        tokenizer: its tokenizer.
        config: how the cache is stored and evicted.
        rescue: "off", "auto", the URL of a rescue service, or a `RescueConfig`. By default off, and a loaded
            conversation keeps a service on this machine.
        system_prompt: system prompt of the conversation.
        session_id: name of the conversation at the service. Without one, the service deletes the conversation when it
            is closed, unless it was saved.
        max_tokens: maximum tokens per answer; -1 for all that the model allows.
        sampler: a sampler such as `mlx_lm.sample_utils.make_sampler` returns; greedy by default. It runs in the
            session's thread, so arrays that it holds must be computed (`mx.eval`).
        logits_processors: processors such as `mlx_lm.sample_utils.make_logits_processors` returns; the same holds for
            them.
        seed: seed of the sampler; by default a random one.
        prefill_step_size: tokens of a prefill step; eviction happens between steps.
        template: options of the chat template.
        prefix_cache: where the first prompt of a conversation is cached: a folder, "auto" for one in the user's cache
            folder, "off", or a `Folder` with a limit.
        state_format: format of the recurrent states that are kept for `undo` and in the prefix cache: "exact", or "q8"
            for 8 bits.
        state_step: number of tokens between the recurrent states of a prompt in the prefix cache.
        shadow: let the model's own cache answer, and compare the compressed one with it every `shadow` tokens.
        prompt_lookup: speculative decoding with drafts copied from the conversation. "auto" drafts where that is
            possible and expected to be faster, "on" wherever text repeats, and "off" never. With caches that cannot be
            rolled back, "auto" does nothing, and "on" raises a ConfigError. Timing decides when "auto" drafts, so two
            runs of a 16-bit model with one seed can differ in a token; with "off" they do not.
        on_full: what a turn does for which the model's context has no room left. "stop" raises a ConfigError.
            "drop-oldest" removes the oldest turns, except the system prompt, and prefills the others at new positions;
            a rescue service still finds the removed ones.
        warn: called with each warning for the user.

    Attributes:
        turns: statistics of the turns so far, without those of a loaded conversation before it was saved.
        cache: the prompt cache.
        plan: how the cache is stored; None for mlx-lm's own.
        client: the client of the rescue service, or None.
        context_length: positions that the model allows, or None.

    Raises:
        ConfigError: an invalid setting.
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
        prefill_step_size: int = 512,
        template: dict[str, Any] | None = None,
        prefix_cache: str | Folder | None = None,
        state_format: str = DEFAULT_STATES.format,
        state_step: int = DEFAULT_STATES.step,
        shadow: int | None = None,
        prompt_lookup: str = AUTO,
        on_full: str = STOP,
        logits_processors: Sequence[Callable[..., Any]] = (),
        warn: Callable[[str], None] = warnings.warn,
    ) -> None:
        _check_settings(system_prompt, session_id, max_tokens, sampler, seed, prefill_step_size)
        _check_modes(on_full, shadow, prompt_lookup)
        if shadow is not None and config.evict is not None and config.evict.recall == "auto":
            config = replace(config, evict=replace(config.evict, recall="off"))  # the whole cache answers
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.rescue = rescue if isinstance(rescue, RescueConfig) else RescueConfig(service=rescue or OFF)
        self._may_take_rescue = rescue is None  # from a file
        self.max_tokens, self.sampler, self.prefill_step_size = max_tokens, sampler, prefill_step_size
        self.logits_processors, self.on_full = logits_processors, on_full
        self.context_length = position_limit(model)
        self.turns: list[TurnStats] = []
        self._warn = warn
        self._length_limit = PromptLengthLimit(tokenizer, self.context_length)
        self.lookup_mode = LookupMode(prompt_lookup)
        self._plain, self._template_options = PlainText(tokenizer), template
        self._template = self._make_template(system_prompt)
        self._keeps_text = session_id is not None  # at the service, when the session is closed
        self._lock = Lock()  # held while the conversation changes
        self._is_stopping = self._is_closed = False
        self._warned: set[str] = set()
        # Compute what is still lazy in the caller's thread, such as a change of the model's dtype.
        mx.eval([value for module in model.modules() for value in module.values() if isinstance(value, mx.array)])
        self._worker = Worker()
        weakref.finalize(self, self._worker.end)  # even when the program ends
        self.seed(secrets.randbits(63) if seed is None else seed)
        self.plan = self._worker.run(lambda: self._make_plan(self.config))
        if self.plan is not None:
            warn_uncalibrated(self.plan, stacklevel=3)
        self._prefix_folder, self._shadow_every = open_folder(prefix_cache, ranks=ranks_of(model)), shadow
        self._prefix_cache: PrefixCache | None = None
        self._states = StateStorage(state_format, state_step)
        self._worker.run(lambda: choose_state_storage(self.model, self._states))  # refuses a format that saves nothing
        caches = self._worker.run(self._make_caches)
        self.lookup_mode.check(model, caches)
        self.client = open_client(self.rescue.service)  # last: it may start a process
        self._begin(session_id or uuid.uuid4().hex, caches)

    def _make_template(self, system_prompt: str | None) -> TurnTemplate:
        self._length_limit.check(len(system_prompt or ""), "system prompt")
        return TurnTemplate(self.tokenizer, self._plain, system_prompt, self._template_options)

    def _make_plan(self, config: KVConfig) -> Plan | None:
        return None if config.is_off else plan_caches(self.model, config)

    def _make_caches(self) -> list[Any]:
        has_prefix_cache = self._prefix_folder is not None
        self.shadow = make_shadow(self.model, self.plan, self._shadow_every, has_prefix_cache=has_prefix_cache)
        if self.shadow is not None:
            return self.shadow.caches
        return make_prompt_cache(self.model) if self.plan is None else build_caches(self.plan)

    def _begin(self, session_id: str, caches: list[Any]) -> None:
        self.session_id = session_id
        self._use_caches(caches)
        limit = quotation_limit(self.rescue, self.context_length)
        temporary = not self._keeps_text
        self._transcript = Transcript(self._plain, self.client, self.rescue, session_id, limit, temporary=temporary)
        self._transcript.opening = self._template.opening

    def _use_caches(self, caches: list[Any]) -> None:
        self.cache, self._history = caches, StateHistory(self._states.format)

    # A turn.

    def respond(
        self, text: str, *, max_tokens: int | None = None, progress: ProgressCallback | None = None
    ) -> Iterator[str]:
        """Yield the answer to a message piece by piece. Leave the loop, or call `stop`, to end it early.

        Args:
            text: the user's message.
            max_tokens: maximum tokens of this answer; by default those of the session.
            progress: called in the session's thread with the number of prefilled tokens and the total.

        Raises:
            ConfigError: `text` is not UTF-8 text, the conversation would exceed the model's context (with `on_full`
                "drop-oldest", `text` alone would), a turn is in progress, or the session is closed.
            NonFiniteError: the model's logits are NaN.
        """
        if self._is_closed:
            raise ConfigError("the session is closed; create a new session and load the saved conversation.")
        check_text(text, "message")
        used = 0 if self.on_full == DROP_OLDEST else len(self._transcript.ids)
        self._length_limit.check(len(text), "message", used=used)
        max_tokens = self.max_tokens if max_tokens is None else max_tokens
        check_max_tokens(max_tokens)
        with self._alone():
            self._is_stopping = False
            answer = self._answer(text, max_tokens, progress or (lambda done, total: None))
            yield from self._worker.iterate(answer, self.stop)
        self._warn_after_turn()

    def _answer(self, text: str, max_tokens: int, progress: ProgressCallback) -> Generator[str]:
        transcript, message_ids = self._transcript, [*self._plain.encode(text), *self._template.closing]
        try:
            prefilled = self._remove_if_full(len(message_ids), max_tokens, progress)
        except StoppedError:
            return
        start = len(transcript.ids)
        self._history.keep(self.cache, start)
        before = self._template.between(transcript.ids[-1]) if start else transcript.opening
        prompt = [*before, *message_ids]
        check_token_ids(self.model, prompt)
        room = self._room_after(len(prompt), start)
        can_restore = self.config.evict is not None and (self.config.evict.recalls or self.client is not None)
        turn = Turn(
            self.model,
            self.tokenizer,
            self.cache,
            transcript,
            self.prefill_step_size,
            prefix_cache=None if start or transcript.removed else self._open_prefix_cache(),
            shadow=self.shadow,
            lookup_mode=self.lookup_mode,
            history=self._history,
            progress=lambda done, total: progress(prefilled + done, prefilled + total),
            is_stopped=lambda: self._is_stopping,
        )
        try:
            with turn:
                split = can_restore and self.shadow is None and len(prompt) > MAX_QUESTION
                turn.prepare(prompt, text, split=split, quote_at=len(before), room=room)
                processors = list(self.logits_processors)
                for response in turn.decode(max_tokens, sampler=self.sampler, logits_processors=processors):
                    yield response.text
        finally:
            if not turn.is_consistent:
                raise CacheFormatError(
                    "the turn was interrupted, and this model's cache cannot be trimmed. Reset the session."
                )
            if not turn.is_undone:
                self.turns.append(stats := turn.stats)
                stop = start + stats.prompt_tokens - len(self._template.closing)
                end = len(transcript.ids)  # before these if the turn was interrupted and cannot be undone
                transcript.turn_ranges.append(TurnRange(start, min(start + len(before), end), min(stop, end)))
            elif not start:
                self._use_caches(self._make_caches())
                transcript.truncate(0)

    def _remove_if_full(self, message_tokens: int, max_tokens: int, progress: ProgressCallback) -> int:
        """Remove the oldest turns if a message of `message_tokens` tokens and its answer do not fit.

        Returns how many tokens were prefilled again, 0 if nothing was removed.
        """
        transcript, limit = self._transcript, self.context_length
        if self.on_full != DROP_OLDEST or limit is None or not transcript.turn_ranges:
            return 0
        most = limit // _ANSWER_SHARE
        answer = most if max_tokens < 0 else min(max_tokens, most)
        quotation = quotation_limit(self.rescue, limit) if self.client is not None else 0
        quotation = ranks_of(self.model).broadcast(lambda: quotation)  # only the first rank has a client
        fits = limit - message_tokens - len(self._template.between(transcript.ids[-1])) - quotation - answer
        lengths = transcript.lengths_after_removal()
        count = next((count for count, length in enumerate(lengths) if length <= fits), len(lengths) - 1)
        if not count:
            return 0
        if not lengths[count]:
            self._room_after(len(transcript.opening) + message_tokens, 0)
        remaining, tokens = transcript.ids_after_removal(count), len(transcript.ids)
        caches = self._prefill_again(remaining, lambda done, total: progress(done, total + message_tokens))
        transcript.remove(count)
        self._use_caches(caches)
        searched = "; a search still finds their text" if self.client is not None else ""
        self._warn(
            f"the context of {limit:,} tokens was full: the oldest {count:,} of {len(lengths) - 1:,} turns "
            f"({tokens - len(remaining):,} tokens) were removed{searched}. The rest ({len(remaining):,} tokens) was "
            "prefilled again, and the counts of live and evicted tokens start at zero."
        )
        return len(remaining)

    def _prefill_again(self, ids: list[int], progress: ProgressCallback | None) -> list[Any]:
        """Return new caches of `ids`; raise StoppedError if the session is stopped meanwhile."""
        caches = self._make_caches()
        with compressed_attention(self.model):
            prefill(self.model, caches, ids, self.prefill_step_size, self._stoppable(progress))
        return caches

    def _stoppable(self, progress: ProgressCallback | None) -> ProgressCallback:
        """Return a callback that raises StoppedError once the session is stopped."""

        def report(done: int, total: int) -> None:
            if progress is not None:
                progress(done, total)
            if self._is_stopping:
                raise StoppedError

        return report

    def _room_after(self, tokens: int, used: int) -> int:
        """Return how many positions remain after `used` and `tokens` more; raise a ConfigError if none do."""
        if self.context_length is None:
            return UNLIMITED
        room = self.context_length - used - tokens
        if room < 1:
            fits = max(0, tokens + room - 1)  # one is for the answer
            raise ConfigError(
                f"this turn needs {tokens:,} tokens, but only {fits:,} of the model's {self.context_length:,} "
                "positions are free (evicted tokens keep theirs). Shorten the turn, start a new conversation (reset), "
                "or use a model with a longer context."
            )
        return room

    def _open_prefix_cache(self) -> PrefixCache | None:
        if self._prefix_folder is None or self.plan is None:
            return None
        if self._prefix_cache is None or self._prefix_cache.plan is not self.plan:
            self._prefix_cache = PrefixCache(
                self.model, self.plan, self._prefix_folder, self._warn_once, states=self._states
            )
        return self._prefix_cache

    def stop(self) -> None:
        """End the current answer after its next token; safe in a signal handler and from other threads."""
        self._is_stopping = True

    def quote(self, query: str) -> Quotation:
        """Return the evicted text that a question needs, quoted. `respond` does this by itself."""
        live = self._live_positions()
        return self._transcript.quote(search_evicted(self.model, self._transcript, query, live), live)

    def _live_positions(self) -> np.ndarray:
        return live_positions(self.cache, len(self._transcript.ids))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other threads from changing the conversation; raise ConfigError if one does already."""
        if not self._lock.acquire(blocking=False):
            raise ConfigError("a turn is in progress; read its answer to the end, or close it, before anything else.")
        try:
            yield
        finally:
            self._lock.release()

    def _warn_after_turn(self) -> None:
        tokens = len(self._transcript.ids)
        limit = self.context_length
        if limit is not None and tokens > _NEARLY_FULL * limit and self.on_full == STOP:
            self._warn_once(
                f"the conversation has {tokens:,} of the model's {limit:,} positions. It ends when they are used up; "
                "evicted tokens count.",
                topic="context",
            )
        recalls = self.config.evict is not None and self.config.evict.recalls
        evicted = tokens - len(self._live_positions())
        if evicted and self.client is None and not recalls and self.shadow is None:
            self._warn_once(
                "evicted tokens are dropped, so the answer cannot use them. Add --kv-recall auto, or --rescue auto.",
                topic="eviction",
            )
        for warning in (take_archive_warning(self.cache), self.client.take_warning() if self.client else None):
            if warning is not None:
                self._warn_once(warning)

    def _warn_once(self, message: str, topic: str | None = None) -> None:
        """Warn once of a topic; by default the message is one."""
        if (topic or message) not in self._warned:
            self._warned.add(topic or message)
            self._warn(message)

    # The conversation.

    @property
    def ids(self) -> list[int]:
        """Return all tokens of the conversation by position, evicted ones included."""
        return list(self._transcript.ids)

    @property
    def last_exchange(self) -> tuple[str, str] | None:
        """Return the last question and its answer, those of a loaded conversation included, or None."""
        if not self._transcript.turn_ranges:
            return None
        _, start, stop = self._transcript.turn_ranges[-1]
        ids, quoted = self._transcript.ids, {i for span in self._transcript.quoted for i in range(*span)}
        question = [ids[i] for i in range(start, stop) if i not in quoted]
        answer = ids[stop + len(self._template.closing) :]
        decode = self.tokenizer.decode
        return decode(question, skip_special_tokens=True), decode(answer, skip_special_tokens=True)

    @property
    def stats(self) -> CacheStats:
        """The tokens and bytes of the cache."""
        return self._worker.run(lambda: cache_stats(self.cache, self.plan))

    @property
    def recalled_tokens(self) -> int:
        """How many tokens the last turn recalled."""
        return len(self.turns[-1].recalled) if self.turns else 0

    @property
    def quoted_tokens(self) -> int:
        """How many tokens the quotations of the conversation have."""
        return sum(stop - start for start, stop in self._transcript.quoted if start >= 0)

    @property
    def num_turns(self) -> int:
        """How many turns the conversation has, those of a loaded one included, and without removed ones."""
        return len(self._transcript.turn_ranges)

    @property
    def removed_tokens(self) -> int:
        """How many tokens of the conversation were removed because its context was full."""
        return len(self._transcript.removed)

    def seed(self, seed: int) -> None:
        """Seed the sampler, from the next token on."""
        _check_seed(seed)
        self._worker.run(lambda: mx.random.seed(seed))

    def undo(self, progress: ProgressCallback | None = None) -> str:
        """Remove the last question and its answer, and return the question.

        Turns that were removed to free context stay removed.

        The cache is trimmed, and recurrent states are restored if the turn is one of the last two. If the turn evicted
        tokens that are not archived, or the cache cannot be trimmed, the remaining turns are prefilled again. Rows of
        the turn are removed from the archive. Its text is removed from the rescue service, unless the conversation has
        a name or was loaded: the service then keeps it, as it keeps what earlier conversations of that name evicted,
        but a search does not find it any more.

        Args:
            progress: called in the session's thread with the number of tokens prefilled again and the total.

        Raises:
            ConfigError: there is no turn, a turn is in progress, the session has a shadow, or `stop` was called before
                the end; then nothing has changed.
        """
        with self._alone():
            self._check_no_shadow()
            exchange = self.last_exchange
            if exchange is None:
                raise ConfigError("there is nothing to undo; say something first.")
            self._is_stopping = False
            try:
                self._worker.run(lambda: self._undo(progress))
            except StoppedError as error:
                raise ConfigError("interrupted: nothing was undone.") from error
            return exchange[0]

    def _undo(self, progress: ProgressCallback | None) -> None:
        length = self._transcript.turn_ranges[-1].start
        if not (length and roll_back(self.cache, length, self._history)):
            self._use_caches(self._prefill_again(self._transcript.ids[:length], progress))
        self._transcript.truncate(length)
        del self.turns[-1:]

    def compact(self, share: float, progress: ProgressCallback | None = None) -> None:
        """Keep a share of the rows of the conversation so far: those that the model needs most to repeat it.

        For a document about which further turns ask. `compact_prompt_cache` says which rows are kept.

        Args:
            share: of the rows to keep, above 0 to 1.
            progress: called in the session's thread with the number of tokens read again and the total.

        Raises:
            ConfigError: what `compact_prompt_cache` raises; there is nothing to compact, a turn is in progress, the
                session has a shadow, or `stop` was called before the end; then nothing has changed.
        """
        with self._alone():
            self._check_no_shadow()
            if not self._transcript.ids:
                raise ConfigError("there is nothing to compact; say something first.")
            self._is_stopping = False
            ids, report = self._transcript.ids, self._stoppable(progress)
            try:
                compacted = self._worker.run(
                    lambda: compact_prompt_cache(self.model, self.tokenizer, self.cache, ids, share, progress=report)
                )
                self._use_caches(compacted)
            except StoppedError as error:
                raise ConfigError("interrupted: nothing was compacted.") from error

    def reset(self, system_prompt: str | None = None) -> None:
        """Start a new conversation without a name. The service deletes this one unless it was saved or has a name.

        Args:
            system_prompt: its system prompt; by default that of the session.

        Raises:
            ConfigError: a turn is in progress, or the system prompt cannot be used; then nothing has changed.
        """
        with self._alone():
            if system_prompt is not None:
                check_text(system_prompt, "system prompt")
                self._template = self._make_template(system_prompt)
            self._forget()
            self.turns, self._keeps_text = [], False
            self._begin(uuid.uuid4().hex, self._worker.run(self._make_caches))

    def save(self, path: str | Path) -> None:
        """Write the conversation to a .safetensors file: a prompt cache with the tokens in its metadata.

        Raises:
            ConfigError: there is nothing to save, a turn is in progress, or the session has a shadow.
            CacheFormatError: the file cannot be written, or exists and is no conversation.
        """
        with self._alone():
            if not self._transcript.ids:
                raise ConfigError("there is nothing to save; say something first.")
            self._check_no_shadow()
            transcript = self._transcript
            conversation = SavedConversation(
                id=self.session_id,
                ids=transcript.ids,
                quoted=transcript.quoted,
                rescue=self.rescue,
                turn_ranges=transcript.turn_ranges,
                opening=transcript.opening,
                removed=transcript.removed,
            )
            metadata = {CONVERSATION: conversation.to_json()}
            model, config = self.model, self.config
            self._worker.run(lambda: save_prompt_cache(path, self.cache, model=model, config=config, metadata=metadata))
            self._keeps_text = True

    def load(self, path: str | Path) -> None:
        """Continue a conversation that `save` wrote, even in another process, with the configuration that it had.

        Sends its evicted text to the service again, and waits for that up to a minute.

        Raises:
            CacheFormatError: the file is damaged, or holds no conversation with this model.
            ConfigError: a turn is in progress, or the session has a shadow.
        """
        with self._alone():
            self._check_no_shadow()
            if not os.path.isfile(path):  # noqa: PTH113  Path.is_file raises for long names
                raise CacheFormatError(f"there is no saved conversation {path}. Make one with /save in mlx_tq.chat.")
            loaded = self._worker.run(lambda: load_prompt_cache(path, model=self.model))
            if CONVERSATION not in loaded.metadata:
                raise CacheFormatError(
                    f"{path} is a prompt cache, not a conversation. Use it with mlx_tq.generate --prompt-cache-file."
                )
            with refuse_damaged(path):
                saved = SavedConversation.from_json(loaded.metadata[CONVERSATION])
            ids, rescue = saved.ids, saved.rescue
            lengths = set(cache_offsets(loaded.caches))
            if lengths - {len(ids)}:
                raise CacheFormatError(f"{path} holds {len(ids)} tokens and a cache of {lengths}; it is damaged.")
            plan = self._worker.run(lambda: self._make_plan(loaded.config))
            self._forget()
            # No file may choose a service on another machine.
            if self._may_take_rescue and self.client is None and rescue.service == AUTO:
                self.rescue, self.client = rescue, open_client(rescue.service)
            elif self._may_take_rescue and self.client is None and rescue.service != OFF:
                self._warn_once(
                    f"the conversation used the rescue service {rescue.service}; a file cannot select one. Give "
                    f"--rescue {rescue.service} to use it."
                )
            self.turns, self.config, self.plan, self._keeps_text = [], loaded.config, plan, True
            self._begin(saved.id, loaded.caches)
            transcript = self._transcript
            transcript.ids, transcript.quoted, transcript.turn_ranges = ids, saved.quoted, saved.turn_ranges
            transcript.opening, transcript.removed = saved.opening, saved.removed
            transcript.send_evicted(np.setdiff1d(np.arange(-len(saved.removed), len(ids)), self._live_positions()))
            if self._transcript.has_sent and self.client is not None and not self.client.flush(_FLUSH_S):
                self._warn_once(
                    f"the rescue service has not taken all of the evicted text within {_FLUSH_S:g} s; until it has, "
                    "answers may miss some of it."
                )

    def _check_no_shadow(self) -> None:
        if self.shadow is not None:
            raise ConfigError(
                "a conversation with --kv-shadow cannot be saved, loaded, compacted or undone. Start again without it."
            )

    def close(self) -> None:
        """End the conversation. The service deletes it unless it was saved or has a name."""
        self._is_closed = True
        if self.client is not None:
            self._forget()
            self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _forget(self) -> None:
        if self.client is not None and self._transcript.has_sent and not self._keeps_text:
            self.client.forget(self.session_id)


def _check_settings(
    system_prompt: Any, session_id: Any, max_tokens: Any, sampler: Any, seed: Any, prefill_step_size: Any
) -> None:
    if system_prompt is not None:
        check_text(system_prompt, "system prompt")
    check_max_tokens(max_tokens)
    if session_id is not None and not (isinstance(session_id, str) and SESSION_ID.fullmatch(session_id)):
        raise ConfigError(f"session_id is {session_id!r:.80}; it must be 1 to 64 letters, digits, _ and -.")
    if not _is_whole_number(prefill_step_size, 1):
        raise ConfigError(f"prefill_step_size is {prefill_step_size!r}; it must be a whole number of 1 or more.")
    if seed is not None:
        _check_seed(seed)
    if sampler is not None and not callable(sampler):
        raise ConfigError(
            f"sampler is of type {type(sampler).__name__}; it must be a function of log-probabilities, such as one of "
            "mlx_lm.sample_utils.make_sampler, or None."
        )


def _check_seed(seed: Any) -> None:
    if not (_is_whole_number(seed, 0) and seed < 2**64):
        raise ConfigError(f"seed is {seed!r:.80}; it must be a whole number from 0 to 2^64 - 1.")


def _check_modes(on_full: Any, shadow: int | None, prompt_lookup: str) -> None:
    if on_full not in ON_FULL:
        raise unknown_name("on_full", on_full, ON_FULL)
    if on_full == DROP_OLDEST and shadow is not None:
        raise ConfigError(
            f'shadow and on_full="{DROP_OLDEST}" cannot be combined: a shadow needs the whole conversation. Leave out '
            "one of them."
        )
    if prompt_lookup == ON and shadow is not None:
        raise ConfigError(
            'shadow and prompt_lookup="on" cannot be combined: a shadow compares single steps. Leave out one of them.'
        )


def _is_whole_number(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
