"""Choose the profile, and a budget for eviction where none fits, for the memory that --memory allows."""

import argparse
import os
from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Any

from mlx_tq.cli.loading import outline_model
from mlx_tq.cli.options import NAMING_FORMATS, OPTIONS, Request, name_of
from mlx_tq.cli.screen import human_bytes, note
from mlx_tq.config import KVConfig
from mlx_tq.errors import ConfigError
from mlx_tq.integration.probe import position_limit
from mlx_tq.models import dense_weights
from mlx_tq.prompt_cache.memory import (
    MAX_PREFILL_STEP,
    PREFILL_STEP,
    other_bytes,
    sequence_bytes,
    transient_bytes,
    weights_nbytes,
)

_PROFILES = ("safe", "balanced", "small", "tiny")  # the best first
_POLICY = "triattention"
_BUDGET_STEP = 256  # tokens
_STEPS = (1024, 512, PREFILL_STEP)  # tokens, shorter prefill steps, which are tried before a smaller profile


def fit_memory(request: Request) -> Request:
    """Return `request` with the best profile whose weights and cache fit into --memory, and say which it is.

    A profile or format that was typed is kept. Where no profile fits, tokens are evicted from the smallest one.

    Raises:
        ConfigError: not even a cache that evicts fits, or the context is unknown or too long.
    """
    fit = _MemoryFit(request)
    typed = " ".join(f"{flag} {request.args.typed[flag]}" for flag in NAMING_FORMATS if flag in request.args.typed)
    if typed:
        chosen, need = request, fit.need(request.config)
        line = f"{typed} {'fits' if need.fits else 'does not fit'} ({need.describe(fit.context)})"
    else:
        chosen, need, line = fit.choose()
    if getattr(request.args, "verbose", True):
        note(f"Memory {fit.memory}, weights {human_bytes(fit.weights)}: {line}")
    changes: dict[str, Any] = {"dequantize": fit.dequantize}
    if request.args.dequantize is None and fit.dequantize:
        changes["dtype"] = request.args.dtype or "float32"  # as dense weights were counted
    if need.fits:
        changes["kv_memory_limit"] = fit.available - need.transient
        if need.step < fit.largest_step:  # else a server's is measured
            changes["prefill_step_size"] = need.step
    return replace(chosen, args=_change_args(chosen.args, **changes))


@dataclass(frozen=True)
class _Need:
    """Bytes that a whole context needs, without weights."""

    cache: int
    transient: int  # that a prefill step takes for a moment
    step: int
    fits: bool

    @property
    def nbytes(self) -> int:
        return self.cache + self.transient

    def describe(self, context: str) -> str:
        transient = f"{human_bytes(self.transient)} during prefill in steps of {self.step:,}"
        return f"{human_bytes(self.cache)} for {context}, plus {transient}"


class _MemoryFit:
    """The bytes that the weights of --memory's model leave for caches, and what fits into them."""

    def __init__(self, request: Request) -> None:
        args, model = request.args, outline_model(request.args, request.config)
        limit = position_limit(model)
        self.tokens = args.context or limit or 0
        if limit is None and args.context is None:
            raise ConfigError("--memory needs --context: the model does not say how long its context is.")
        if limit is not None and self.tokens > limit:
            raise ConfigError(f"--context is {self.tokens:,}; the model allows {limit:,}. Lower it, or drop it.")
        self.weights = weights_nbytes(model)
        self.dequantize = dense_weights(model) is not None if args.dequantize is None else args.dequantize
        self.available = args.memory - self.weights
        self.largest_step = args.prefill_step_size or MAX_PREFILL_STEP
        self._steps = [self.largest_step]
        if "--prefill-step-size" not in args.typed:
            self._steps += [step for step in _STEPS if step < self.largest_step]
        self.memory, self.context = human_bytes(args.memory), f"{self.tokens:,} tokens"
        self._request, self._model = request, model
        self._others = other_bytes(model)

    def need(self, config: KVConfig) -> _Need:
        """Return what a whole context needs, with the largest prefill step that fits, or else the smallest."""
        need = None
        for step in self._steps:
            # States and windows are held twice while a step replaces them. A server prefills several prompts together
            # only in the time of one step.
            cache = sequence_bytes(self._model, config, self._others, step)(self.tokens) + self._others(self.tokens)
            transient = transient_bytes(self._model, config, step)(self.tokens)
            need = _Need(cache, transient, step, cache + transient <= self.available)
            if need.fits:
                break
        assert need is not None  # noqa: S101 - tells the type checker
        return need

    def choose(self) -> tuple[Request, _Need, str]:
        """Return the request with the best profile that fits, what it needs, and why it is that one."""
        better, nbytes = "", 0
        for profile in _PROFILES:
            candidate = self._change({"--kv-profile": profile})
            need = self.need(candidate.config)
            if need.fits:
                return candidate, need, f"--kv-profile {profile} fits ({need.describe(self.context)}){better}"
            nbytes = need.nbytes
            better = f"; {profile} would need {human_bytes(self.weights + nbytes)} in total"
        return self._evict(nbytes)

    def _evict(self, smallest: int) -> tuple[Request, _Need, str]:
        """Return the request with the largest budget of tokens that fits; without eviction, `smallest` bytes do not."""
        args, config = self._request.args, self._request.config
        policy = args.kv_evict or _POLICY
        flags = {"--kv-profile": _PROFILES[-1], "--kv-evict": policy}

        def nbytes(tokens: int) -> int:
            return self.need(self._change({**flags, "--kv-budget": str(tokens)}).config).nbytes

        least = config.sinks + config.num_protected + _BUDGET_STEP
        budgets = range(least, self.tokens if args.kv_budget is None else 0, _BUDGET_STEP)
        smallest = min([smallest, *(nbytes(tokens) for tokens in budgets[:1])])
        if smallest > self.available:
            cache, enough = human_bytes(smallest), human_bytes(1.01 * (self.weights + smallest))
            raise ConfigError(
                f"--memory {self.memory} is too small: the weights take {human_bytes(self.weights)}, and the cache of "
                f"{self.context} with its prefill at least {cache}. Give {enough}, a lower --context, or a smaller "
                "model."
            )
        tokens = budgets[bisect_right(budgets, self.available, key=nbytes) - 1]
        flags["--kv-budget"] = str(tokens)
        words = " ".join(f"{flag} {value}" for flag, value in flags.items())
        chosen = self._change(flags)
        need = self.need(chosen.config)
        why = f"because no profile holds all {self.context} ({need.describe('what stays')})"
        return chosen, need, f"{words}, {why}"

    def _change(self, flags: dict[str, str]) -> Request:
        """Return the request as if `flags` were typed; what the environment says of formats gives way."""
        typed = {**self._request.args.typed, **flags}
        values = {name_of(flag): value for flag, value in flags.items()}
        hidden = {OPTIONS[flag].variable for flag in (*NAMING_FORMATS, "--kv-mean-bits")}
        environ = {name: value for name, value in os.environ.items() if name not in hidden}
        return Request.from_args(_change_args(self._request.args, typed=typed, **values), environ)


def _change_args(args: argparse.Namespace, **values: Any) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(args), **values})
