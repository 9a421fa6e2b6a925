"""Answer one prompt: the turn of `mlx_tq.generate`, on the caches that its flags describe."""

import math
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from mlx_tq.cli.loading import PromptCache, calibrate_model, make_caches
from mlx_tq.cli.options import Request
from mlx_tq.cli.screen import prefill_progress, warn
from mlx_tq.cli.terminal_text import say
from mlx_tq.config import RescueConfig
from mlx_tq.errors import ConfigError, NonFiniteError
from mlx_tq.integration.probe import position_limit
from mlx_tq.models import load, ranks_of
from mlx_tq.policies import CalibratedPolicy
from mlx_tq.policies.policy import AUTO as AUTO_CALIBRATION
from mlx_tq.prefix_cache.prefix_cache import PrefixCache
from mlx_tq.prompt_cache.compressed import compressed
from mlx_tq.prompt_cache.statistics import CacheStats, cache_stats, tokens_seen
from mlx_tq.rescue import AUTO, OFF, RescueClient, open_service
from mlx_tq.session.restore import take_archive_warning
from mlx_tq.session.shadow_mode import Shadow
from mlx_tq.session.text import PlainText
from mlx_tq.session.transcript import Transcript, quotation_limit
from mlx_tq.session.turn import UNLIMITED, Turn, TurnStats

_START_S = 60.0  # that a rescue service on this machine may take to start


class Answer(NamedTuple):
    """The generated text, the statistics of turn and cache, and whether anything could be recalled or quoted for it."""

    text: str
    turn: TurnStats
    cache: CacheStats
    can_recall: bool
    can_quote: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as plain data, for JSON."""
        turn = asdict(self.turn)
        positions, by_search, quotation = (turn.pop(name) for name in ("recalled", "by_search", "quotation"))
        archived, seconds = self.turn.archived, self.turn.recall_seconds
        recalled = {"positions": positions, "by_search": by_search, "archived": archived, "seconds": seconds}
        tokens, seconds = len(quotation["ids"]), self.turn.rescue_seconds
        quoted = {"ranges": quotation["ranges"], "tokens": tokens, "seconds": seconds}
        return {
            "text": self.text,
            "stats": {**turn, "cache": self.cache.to_dict()},
            "recalled": recalled if self.can_recall else None,
            "rescued": quoted if self.can_quote else None,
        }


def answer_prompt(
    model: Any,
    tokenizer: Any,
    opened: PromptCache,
    prompt: str,
    ids: list[int],
    max_tokens: int,
    request: Request,
    options: dict[str, Any],
    *,
    prefix_cache: PrefixCache | None,
    shadow: Shadow | None,
) -> Answer:
    """Answer a prompt of tokens `ids`, whose text is searched for; Ctrl-C ends the answer early.

    `options` are more arguments of mlx-lm's `stream_generate`.
    """
    args, caches, plan, limit = request.args, opened.caches, opened.plan, position_limit(model)
    can_recall, can_quote = plan is not None and plan.recalls and request.allows_recall, request.rescue.service != OFF
    restores = can_recall or can_quote
    text = ""
    with ExitStack() as stack:
        transcript = stack.enter_context(_open_transcript(model, tokenizer, request.rescue))
        transcript.append([0] * tokens_seen(caches))  # a file of caches has no tokens
        if args.draft_model is not None:
            draft, draft_caches = _load_draft(model, tokenizer, caches, request)
            stack.enter_context(compressed(draft))
            options |= {"draft_model": draft, "num_draft_tokens": args.num_draft_tokens}
            options |= {"prompt_cache": [*caches, *draft_caches]}
        show = stack.enter_context(prefill_progress(show=args.verbose))
        options |= {name: getattr(args, name) for name in ("kv_bits", "kv_group_size", "quantized_kv_start")}
        step = args.prefill_step_size
        turn = stack.enter_context(
            Turn(model, tokenizer, caches, transcript, step, prefix_cache=prefix_cache, shadow=shadow, progress=show)
        )
        try:
            room = UNLIMITED if limit is None else limit - len(transcript.ids) - len(ids)
            turn.prepare(ids, prompt if restores else None, split=restores, room=room)
            for number, response in enumerate(turn.decode(max_tokens, **options)):
                if number == 0:
                    _check_finite(response)
                text += response.text
                if not args.json:
                    say(response.text)
            for processor in options.get("logits_processors", ()):
                processor.check()
        except KeyboardInterrupt:
            pass
        except ValueError as error:  # mlx-lm's, for options that cannot be combined
            raise ConfigError(str(error)) from error
        answer = Answer(text, turn.stats, cache_stats(caches, plan), can_recall, can_quote)
    if not args.json:
        say("\n")
    if restores and ranks_of(model).is_alone and (warning := take_archive_warning(caches)):
        warn(warning)
    return answer


@contextmanager
def _open_transcript(model: Any, tokenizer: Any, rescue: RescueConfig) -> Iterator[Transcript]:
    """Open the transcript of one answer; the rescue service forgets its text afterwards."""
    client, ranks = None, ranks_of(model)
    if rescue.service != OFF and ranks.is_first:  # which searches for all
        client = RescueClient(open_service(rescue.service))
    limit = quotation_limit(rescue, position_limit(model))
    start_s = _START_S if rescue.service == AUTO else 0.0
    transcript = Transcript(PlainText(tokenizer), client, rescue, uuid.uuid4().hex, limit, start_s)
    try:
        yield transcript
    finally:
        if client is not None:
            if transcript.has_sent:
                client.forget(transcript.session_id)
            client.close()
    if client is not None and (warning := client.take_warning()) and ranks.is_alone:
        warn(warning)


def _load_draft(model: Any, tokenizer: Any, caches: list[Any], request: Request) -> tuple[Any, list[Any]]:
    """Load the draft model, and make its caches."""
    args, config = request.args, request.config
    draft, draft_tokenizer = load(
        args.draft_model,
        dtype=args.dtype,
        dequantize=args.dequantize,
        trust_remote_code=args.trust_remote_code,
    )
    if draft_tokenizer.vocab_size != tokenizer.vocab_size:
        raise ConfigError(
            f"the draft model has a vocabulary of {draft_tokenizer.vocab_size}, the model one of "
            f"{tokenizer.vocab_size}; use a draft model with the model's own tokenizer."
        )
    if len(caches) != len(model.layers):
        raise ConfigError("mlx-lm cannot draft for a model whose layers share caches. Drop --draft-model.")
    if config.evict is not None and isinstance(config.evict.policy, CalibratedPolicy) and config.evict.policy.file:
        policy = replace(config.evict.policy, calibration=AUTO_CALIBRATION)  # the file is of the other model
        config = replace(config, evict=replace(config.evict, policy=policy))
    calibrate_model(draft, draft_tokenizer, config, name=args.draft_model)
    return draft, make_caches(draft, config, args.max_kv_size).caches


def _check_finite(response: Any) -> None:
    if math.isnan(response.logprobs[response.token].item()):
        raise NonFiniteError(
            "the model's logits are NaN after the prompt. Check its weights, or load it in bfloat16 or float32."
        )
