"""One prompt is read and answered: `mlx_tq.generate` from its tokens to its text."""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.generate import stream_generate

from mlx_tq.cli.args import beside_recall, recall_value
from mlx_tq.cli.asking import ask_beforehand
from mlx_tq.cli.foreign_text import say
from mlx_tq.cli.progress import prefill_progress
from mlx_tq.cli.prompt_cache import PromptCache, chosen_config, make_caches
from mlx_tq.cli.screen import warn
from mlx_tq.config import RescueConfig
from mlx_tq.distributed.group import Ranks
from mlx_tq.errors import ConfigError, NonFiniteError
from mlx_tq.integration.probe import position_limit
from mlx_tq.models import load_with_config
from mlx_tq.policies import CalibratedPolicy
from mlx_tq.policies.policy import AUTO
from mlx_tq.prefix_cache.prefix_cache import PrefixCache, reuse_prefix
from mlx_tq.prompt_cache.compressed import compressed
from mlx_tq.prompt_cache.passes import compressed_caches
from mlx_tq.prompt_cache.statistics import GenerationStats, cache_stats
from mlx_tq.rescue import OFF
from mlx_tq.session.bring_back import Brought
from mlx_tq.session.looks import Looks
from mlx_tq.session.one_prompt import OnePrompt
from mlx_tq.session.recall import question_of
from mlx_tq.session.shadow import Shadow

Progress = Callable[[int, int], None]
_ENDLESS = 2**31  # positions of a model that does not say how many it has


class Answer(NamedTuple):
    """What was generated, how, and what came back for it, where anything could."""

    text: str
    stats: GenerationStats
    brought: Brought | None


class Answering:
    """Reads one prompt and answers it, once.

    Args:
        model: of mlx-lm.
        tokenizer: of the model.
        opened: the caches, and their plan.
        args: of the command.
        options: of mlx-lm's `stream_generate`.
        ranks: that run the command together.
        store: of prefixes, or None.
        shadow: that runs beside the model's own cache, or None.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        opened: PromptCache,
        args: argparse.Namespace,
        options: dict[str, Any],
        ranks: Ranks,
        *,
        store: PrefixCache | None,
        shadow: Shadow | None,
    ) -> None:
        self._model, self._tokenizer, self._opened = model, tokenizer, opened
        self._args, self._options, self._ranks = args, options, ranks
        self._store, self._shadow = store, shadow
        self._limit = position_limit(model)
        self._started = self._first = 0.0  # when it began; seconds until the first token
        self._whole = self._cached = 0  # tokens of the prompt, quotations included; of these, from the store
        self._restoring = 0.0  # seconds
        self._said, self._finish = "", "interrupted"
        self._last: Any = None
        self._asking: OnePrompt | None = None
        self._brought: Brought | None = None
        self._looks: Looks | None = None
        self._show: Progress = lambda done, total: None
        self._progress = self._show

    def answer(self, prompt: str, ids: list[int], max_tokens: int, rescue: RescueConfig) -> Answer:
        """Answer; an interruption ends it with what was said by then.

        Args:
            prompt: as text, whose last question is asked of what left.
            ids: of the prompt, with the template around it.
            max_tokens: of the answer.
            rescue: how text comes back.

        Raises:
            ConfigError: options that mlx-lm cannot combine.
            NonFiniteError: the model's logits are NaN.
        """
        caches, models = self._caches_and_models()
        self._started, self._whole = time.perf_counter(), len(ids)
        try:
            with ExitStack() as stack:
                for each in models:
                    stack.enter_context(compressed(each))
                self._show = stack.enter_context(prefill_progress(show=self._args.verbose))
                ids = self._read(stack, prompt, ids, rescue, caches)
                if self._brought is not None and self._limit is not None:
                    max_tokens = min(max_tokens, self._limit - self._whole)
                for response in self._stream(ids, max_tokens, caches):
                    self._take(response)
                self._finish = self._last.finish_reason
                for cache in compressed_caches(caches):
                    cache.check_health()
                for each in self._options.get("logits_processors", ()):
                    each.check()
        except KeyboardInterrupt:
            pass
        except ValueError as error:  # mlx-lm's word for options that cannot be combined
            raise ConfigError(str(error)) from error
        if not self._args.json:
            say("\n")
        for warning in self._asking.warnings() if self._asking is not None and self._ranks.is_alone else ():
            warn(warning)
        if self._looks is not None and self._brought is not None:
            self._brought = replace(self._brought, recalled=self._looks.brought())
        return Answer(self._said, self._stats(), self._brought)

    def _caches_and_models(self) -> tuple[list[Any], list[Any]]:
        if self._args.draft_model is None:
            return self._opened.caches, [self._model]
        draft, caches = _add_draft(self._model, self._tokenizer, self._opened.caches, self._args)
        self._options |= {"draft_model": draft, "num_draft_tokens": self._args.num_draft_tokens}
        return caches, [self._model, draft]

    def _read(
        self, stack: ExitStack, prompt: str, ids: list[int], rescue: RescueConfig, caches: list[Any]
    ) -> list[int]:
        """Restore what a store has; where tokens can come back, read all but the question. Returns what is left."""
        args, step, plan = self._args, self._args.prefill_step_size, self._opened.plan
        possible = beside_recall(args) is None and recall_value(args) != OFF  # whatever a file was made with
        document, rest = ids[:-1], ids[-1:]
        if (possible and plan is not None and plan.recalls) or rescue.service != OFF:
            asks = rescue if self._ranks.is_first else RescueConfig()  # the first one asks for all
            self._asking = stack.enter_context(OnePrompt(self._model, self._tokenizer, caches, asks, self._limit, step))
            document, rest = question_of(self._tokenizer, ids)
        stored = stack.enter_context(reuse_prefix(self._store, caches, document, step))

        def progress(done: int, total: int) -> None:
            stored.note(stored.restored + done)
            self._show(stored.restored + done, stored.restored + total)

        self._progress = progress
        if self._asking is not None:
            self._asking.read(document, stored.restored, progress)
            room = _ENDLESS if self._limit is None else self._limit - self._whole
            self._brought = self._asking.ask(prompt, rest, room)
            self._looks = Looks(caches, self._brought.recalled, quoted=self._brought.rehydration.ranges)
            self._looks.begin()
            self._whole += len(self._brought.rehydration.ids)
            self._progress = lambda done, total: None
        self._cached, self._restoring = stored.restored, stored.seconds
        return ids[stored.restored :] if self._brought is None else [*self._brought.rehydration.ids, *rest]

    def _stream(self, ids: list[int], max_tokens: int, caches: list[Any]) -> Iterator[Any]:
        found: Iterator[Any] = stream_generate(
            self._model,
            self._tokenizer,
            ids,
            max_tokens=max_tokens,
            prompt_cache=caches,
            prompt_progress_callback=self._progress,
            kv_bits=self._args.kv_bits,
            kv_group_size=self._args.kv_group_size,
            quantized_kv_start=self._args.quantized_kv_start,
            **self._options,
        )
        return found

    def _take(self, response: Any) -> None:
        """The next token."""
        if self._last is None:
            self._first = time.perf_counter() - self._started
            self._show(self._whole, self._whole)  # mlx-lm reports nothing of a prompt that a draft model reads too
            _check_finite(response)
        self._last = response
        if self._looks is not None:
            self._looks.token()
        if self._shadow is not None:
            self._shadow.token(response.token, response.text, response.logprobs)
        self._said += response.text
        if not self._args.json:
            say(response.text)

    def _stats(self) -> GenerationStats:
        last = self._last
        rate = last.prompt_tps if last else 0.0
        if self._brought is not None and self._first:
            rate = (self._whole - self._cached) / self._first  # mlx-lm saw the question alone
        return GenerationStats(
            prompt_tokens=self._whole,
            generation_tokens=last.generation_tokens if last else 0,
            ttft=self._first,
            prompt_tps=rate,
            generation_tps=last.generation_tps if last else 0.0,
            finish_reason=self._finish,
            peak_memory=mx.get_peak_memory(),
            cache=cache_stats(self._opened.caches, self._opened.plan),
            cached_tokens=self._cached,
            restore_seconds=self._restoring,
        )


def _add_draft(model: Any, tokenizer: Any, caches: list[Any], args: argparse.Namespace) -> tuple[Any, list[Any]]:
    """The draft model, and the caches of both models."""
    draft, draft_tokenizer, _ = load_with_config(
        args.draft_model,
        dtype=args.dtype,
        dequantize=args.dequantize,
        trust_remote_code=args.trust_remote_code,
    )
    if draft_tokenizer.vocab_size != tokenizer.vocab_size:
        raise ConfigError(
            f"the draft model has a vocabulary of {draft_tokenizer.vocab_size}, the model one of "
            f"{tokenizer.vocab_size}; take a draft model with the model's own tokenizer."
        )
    if len(caches) != len(model.layers):
        raise ConfigError("mlx-lm cannot draft for a model whose layers share caches. Drop --draft-model.")
    config = chosen_config(args)
    if config.evict is not None and isinstance(config.evict.policy, CalibratedPolicy) and config.evict.policy.file:
        policy = replace(config.evict.policy, calibration=AUTO)  # that file is of the other model
        config = replace(config, evict=replace(config.evict, policy=policy))
    ask_beforehand(draft, draft_tokenizer, config)
    return draft, [*caches, *make_caches(draft, config, args.max_kv_size).caches]


def _check_finite(response: Any) -> None:
    if math.isnan(response.logprobs[response.token].item()):
        raise NonFiniteError(
            "the model's logits are NaN after the prompt. Check its weights, or load it in bfloat16 or float32."
        )
