"""Join the ranks, load what a request names (model, calibration, caches, prefix cache), and check that it fits."""

import argparse
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache, RotatingKVCache
from mlx_lm.models.cache import load_prompt_cache as load_native_cache
from mlx_lm.models.cache import make_prompt_cache as make_native_cache

from mlx_tq.cache.layer import cache_parts
from mlx_tq.cache.recurrent_states import StateStorage
from mlx_tq.cli.fast_blas import blas_warning
from mlx_tq.cli.head_calibration import save_head_scores
from mlx_tq.cli.inputs import load_text
from mlx_tq.cli.model_calibration import collect_queries, mix_queries, save_measured_losses, save_queries
from mlx_tq.cli.options import AUTO, SINGLE_PROCESS, Request, given_models, read_options
from mlx_tq.cli.screen import human_bytes, logged_progress, note, stderr, warn
from mlx_tq.config import KVConfig
from mlx_tq.distributed.group import ALONE, Ranks, join
from mlx_tq.distributed.launch import is_launched
from mlx_tq.errors import CacheFormatError, ConfigError, UnsupportedModelError
from mlx_tq.integration.probe import model_facts
from mlx_tq.kernels.gpu import gpu_backend, usable_memory
from mlx_tq.models import (
    EMBEDDED,
    dense_weights,
    fingerprint,
    free_ram,
    load,
    load_outline,
    ranks_of,
    read_architecture,
    short_name,
    source_name,
    source_of,
)
from mlx_tq.policies import CalibratedPolicy
from mlx_tq.prefix_cache.folder import LIMIT, Folder, open_folder
from mlx_tq.prompt_cache.build import adopt_caches, build_caches
from mlx_tq.prompt_cache.cache_file import (
    Header,
    check_config,
    load_prompt_cache,
    read_header,
    refuse_damaged,
    try_out,
    with_formats,
)
from mlx_tq.prompt_cache.compressed import plan_caches
from mlx_tq.prompt_cache.measurements import calibration_path, find_head_scores, find_losses, make_folder
from mlx_tq.prompt_cache.memory import weights_nbytes
from mlx_tq.prompt_cache.plan import Plan, without_queries

# Share of the GPU's memory for freed buffers, and most bytes of them: some times what a prefill step takes.
_CACHE_SHARE, _MAX_BUFFER_CACHE = 8, 8 * 10**9
_ANSWERING = ("generate", "chat", "server", "cache_prompt")  # commands that measure nothing


def join_ranks(request: Request) -> Ranks:
    """Join the processes that `mlx.launch` started, if it did; all but the first write nothing from then on."""
    ranks = join() if is_launched() else ALONE
    if ranks.is_alone:
        return ranks
    for flag in SINGLE_PROCESS:
        if flag in request.args.typed or request.values.get(flag) is not None:
            raise ConfigError(
                f"{flag} needs a single process, and {ranks.size} ranks were started. Drop one of the two."
            )
    stderr.quiet = not ranks.is_first
    return ranks


def limit_buffer_cache(usable: int | None = None) -> int | None:
    """Limit the freed buffers that mlx keeps for reuse on a GPU, of which `usable` bytes may be used; return the limit.

    By default they may fill the GPU's memory, because a growing context frees buffers that are too small for its next
    ones. On a CPU, mlx keeps 32 MB by itself, and None is returned.
    """
    if usable is None:
        if gpu_backend() is None:
            return None
        usable = usable_memory()
    limit = min(usable // _CACHE_SHARE, _MAX_BUFFER_CACHE)
    mx.set_cache_limit(limit)
    return limit


def load_options(args: argparse.Namespace, *configs: KVConfig, **tokenizer_config: Any) -> dict[str, Any]:
    """Return the options of `models.load` that a command's flags name.

    With mlx-lm's own caches alone, packed weights stay packed, as in mlx-lm, unless --dequantize says otherwise.
    """
    is_native = bool(configs) and all(config.is_off for config in configs)
    stays_packed = args.dequantize is None and (is_native or getattr(args, "quantize_activations", False))
    return {
        "dtype": args.dtype,
        "dequantize": False if stays_packed else args.dequantize,
        "adapter_path": getattr(args, "adapter_path", None),
        "tokenizer_config": {"trust_remote_code": args.trust_remote_code, **tokenizer_config},
        "trust_remote_code": args.trust_remote_code,
    }


def load_model(
    args: argparse.Namespace, *configs: KVConfig, ranks: Ranks = ALONE, **tokenizer_config: Any
) -> tuple[Any, Any]:
    """Return the model of a command's flags, calibrated for all of `configs`, and its tokenizer.

    Each of several ranks gets its part of the model.
    """
    limit_buffer_cache()
    model, tokenizer = load(args.model, ranks=ranks, **load_options(args, *configs, **tokenizer_config))
    note_weights(model, args)
    calibrate_model(model, tokenizer, *configs, name=args.model, waits=waits_for_calibration(args))
    return model, tokenizer


def load_draft_model(args: argparse.Namespace, config: KVConfig, tokenizer: Any) -> tuple[Any, Any]:
    """Return the model of --draft-model and its tokenizer, which must be that of the model that it drafts for."""
    options = load_options(args, config) | {"adapter_path": None}
    draft, draft_tokenizer = load(args.draft_model, **options)
    if draft_tokenizer.vocab_size != tokenizer.vocab_size:
        raise ConfigError(
            f"the draft model's vocabulary has {draft_tokenizer.vocab_size} tokens, the model's has "
            f"{tokenizer.vocab_size}. Use a draft model with the same tokenizer."
        )
    return draft, draft_tokenizer


def note_weights(model: Any, args: argparse.Namespace) -> None:
    """Say what dequantizing the weights cost, unless it was asked for, and what would multiply them faster."""
    sizes, source = dense_weights(model), source_of(model)
    if sizes is not None and "--dequantize" not in args.typed:
        before, after = human_bytes(sizes.packed_nbytes), human_bytes(sizes.dense_nbytes)
        note(
            f"Weights dequantized, which is faster on a CPU: {after} instead of {before}. --dequantize off keeps them "
            "packed"
        )
    if source is not None and source.dtype == "float32" and (warning := blas_warning()) is not None:
        note(warning)


def weights_dict(model: Any) -> dict[str, Any]:
    """Return the bytes of a model's weights as plain data, and what they took before they were dequantized."""
    sizes = dense_weights(model)
    return {"nbytes": weights_nbytes(model), "packed_nbytes": None if sizes is None else sizes.packed_nbytes}


def apply_cache_source(args: argparse.Namespace, path: str) -> None:
    """Set the model flags of `args` from a cache file; raise ConfigError for flags that contradict it."""
    header = read_header(path)
    source = header.source
    if source is None:
        return
    made, given = [f"--model {source.model or EMBEDDED}"], []
    if args.model is None:
        args.model = source.model or None
    elif _is_other_model(args.model, header):
        given.append(f"--model {args.model}")
    for name in ("dtype", "adapter_path", "dequantize"):
        flag, value, typed = f"--{name.replace('_', '-')}", getattr(source, name), getattr(args, name)
        if value:
            made.append(_flag_with(flag, value))
        if typed is None:
            setattr(args, name, value)
        elif name == "dtype" and value is None:  # the weights were of several types
            continue
        elif header.is_ours and value != (str(Path(typed).resolve()) if name == "adapter_path" else typed):
            given.append(_flag_with(flag, typed))
    if given:
        drop = "that flag" if len(given) == 1 else "those flags"
        raise ConfigError(
            f"{path} was made with {_join(made)}, not with {_join(given)}. Drop {drop}: the file names what it needs."
        )


def _flag_with(flag: str, value: str | bool) -> str:
    return f"{flag} {value}" if isinstance(value, str) else f"{flag} {'on' if value else 'off'}"


def _is_other_model(model: str, header: Header) -> bool:
    """Return whether a model is not that of a cache file, as far as its name and its configuration say."""
    source = header.source
    if source is None or source_name(model) == source_name(source.model or None):
        return False
    if not header.is_ours:  # without a fingerprint, by which a copy of the model would be known
        return True
    architecture = read_architecture(model)
    return "" not in (architecture, source.architecture) and architecture != source.architecture


def _join(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def waits_for_calibration(args: argparse.Namespace) -> bool:
    """Return whether eviction is calibrated before the first answer.

    On a CPU this takes minutes, so commands that answer wait only with `--kv-calibration auto`.
    """
    has_chosen = read_options(args, os.environ)["--kv-calibration"] == AUTO
    return has_chosen or gpu_backend() is not None or args.command not in _ANSWERING


def outline_model(args: argparse.Namespace, *configs: KVConfig) -> Any:
    """Return the outline of the model of a command's flags, before its weights are read or downloaded."""
    model, *others = given_models(args)
    if others:
        raise needs_one_model("--memory", 1 + len(others))
    options = {name: load_options(args, *configs)[name] for name in ("dtype", "dequantize", "trust_remote_code")}
    return load_outline(model, memory=args.memory, **options)


def needs_one_model(flag: str, count: int) -> ConfigError:
    return ConfigError(f"{flag} is for one model, and --model names {count}. Drop it, or name one model.")


def calibrate_model(
    model: Any, tokenizer: Any, *configs: KVConfig, name: str | None = None, waits: bool = True
) -> None:
    """Measure, once per model, what `configs` need: layer losses for mean bits, and query statistics for eviction.

    Without `waits`, and where a model cannot be calibrated, a line says so, and the policy learns from the prompt.
    """
    title = short_name(name)
    for config in configs:
        if config.mean_bits is not None and find_losses(fingerprint(model)) is None:
            save_measured_losses(model, tokenizer, load_text(), title)
        policy = None if config.evict is None else config.evict.policy
        if policy is not None and policy.by_head and find_head_scores(fingerprint(model)) is None:
            save_head_scores(model, tokenizer, load_text(), title)
        if not isinstance(policy, CalibratedPolicy) or not policy.uses_auto_calibration:
            continue
        if not plan_caches(model, config).calibrates_on_prompt:
            continue
        if not waits:
            note(
                f"{title} is not calibrated for eviction, which takes minutes on a CPU: {policy.name} learns from the "
                "prompt. --kv-calibration auto calibrates it, once."
            )
            continue
        try:
            _calibrate_queries(model, tokenizer, title, covariance=policy.needs_covariance)
        except (CacheFormatError, ConfigError) as error:
            warn(
                f"calibration of eviction failed ({error}). {policy.name} learns from the prompt instead, and may "
                "evict what a question needs. Pass --kv-calibration FILE, or --kv-calibration text."
            )


def _calibrate_queries(model: Any, tokenizer: Any, title: str, *, covariance: bool) -> None:
    """Calibrate and save; if one rank cannot make the folder of the file, raise on all, so that none waits for it."""
    path, failure = calibration_path(fingerprint(model), covariance=covariance), None
    try:
        make_folder(path)  # before the work, not after it
    except ConfigError as error:
        failure = error
    if ranks_of(model).any([failure is not None])[0]:
        raise failure or ConfigError("another rank cannot write to its cache folder.")
    with logged_progress(f"Calibrating eviction for {title} (first run only)") as progress:
        collected = collect_queries(model, tokenizer, load_text(), covariance=covariance, progress=progress)
    save_queries(model, path, mix_queries(*collected))
    note(f"Saved the calibration to {path}")


class PromptCache(NamedTuple):
    """The caches of a model; without a plan they are mlx-lm's own."""

    caches: list[Any]
    plan: Plan | None
    config: KVConfig  # with which they are saved


def make_caches(model: Any, config: KVConfig, max_kv_size: int | None = None) -> PromptCache:
    """Make empty caches; `max_kv_size` is for mlx-lm's own."""
    if config.is_off:
        if max_kv_size is not None and hasattr(model, "make_cache"):
            raise ConfigError(
                f"--max-kv-size {max_kv_size} has no effect on this model, which makes its own caches. Drop it; "
                "--kv-evict and --kv-budget limit a cache."
            )
        return PromptCache(make_native_cache(model, max_kv_size), None, config)
    plan = plan_caches(model, config)
    return PromptCache(build_caches(plan), plan, plan.config)


def open_caches(model: Any, request: Request) -> PromptCache:
    """Make the caches of a request, or load those of its --prompt-cache-file, which mlx-lm may have written."""
    opened = _open(model, request)
    if opened.plan is None and request.args.kv_bits is not None:
        _check_quantizable(model, opened.caches)
    return opened


def _check_quantizable(model: Any, caches: list[Any]) -> None:
    """Raise ConfigError for --kv-bits with caches that mlx-lm cannot quantize, or would leave as they are."""
    others = {type(cache) for cache in caches} - {KVCache, QuantizedKVCache, ArraysCache}
    reason = f"a {min(cls.__name__ for cls in others)}" if others else ""
    with suppress(UnsupportedModelError):  # of a model that only runs on its own caches
        reason = "latents" if any(slot.latent for slot in model_facts(model).slots) else reason
    if reason:
        raise ConfigError(
            f"mlx-lm cannot quantize the caches of this model ({reason}), as --kv-bits says. Use --kv-profile instead."
        )


def _open(model: Any, request: Request) -> PromptCache:
    args, config = request.args, request.config
    path = args.prompt_cache_file
    if path is None:
        return make_caches(model, config, args.max_kv_size)
    header = read_header(path)
    if header.is_ours:
        caches, config = load_prompt_cache(path, model=model)[:2]
        if request.changes_cache:
            check_config(path, config, with_formats(model, request.change(config)))
        if config.is_off:
            _check_native_flags(path, model, caches, args)
            return PromptCache(caches, None, config)
        for flag in ("--kv-bits", "--max-kv-size"):
            if flag in args.typed:
                raise ConfigError(f"{path} holds a compressed cache, which {flag} cannot change. Drop it.")
        return PromptCache(caches, plan_caches(model, config), config)
    return _load_native(model, path, config, args)


def _load_native(model: Any, path: str, config: KVConfig, args: argparse.Namespace) -> PromptCache:
    with refuse_damaged(path):
        caches = load_native_cache(path)
    count = len(make_native_cache(model))
    if len(caches) != count:
        raise CacheFormatError(
            f"{path} has {len(caches)} caches, but the model has {count}. Pass the model of the file."
        )
    with refuse_damaged(path):
        try_out(caches, model)
    made_with = _check_native_flags(path, model, caches, args)
    if config.is_off:
        return PromptCache(caches, None, config)
    if made_with is not None:
        raise CacheFormatError(
            f"{path} was made by mlx-lm with {made_with}, and cannot be compressed. Add {made_with}, or make it again "
            "without."
        )
    plan = without_queries(plan_caches(model, config))
    return PromptCache(adopt_caches(plan, caches), plan, plan.config)


def _check_native_flags(path: str, model: Any, caches: list[Any], args: argparse.Namespace) -> str | None:
    """Return the flag of mlx-lm that made its caches of a file; raise ConfigError for flags that do not fit them."""
    made_with = None
    for cache, usual in zip(cache_parts(caches), cache_parts(make_native_cache(model)), strict=True):
        if isinstance(cache, QuantizedKVCache):
            made_with, size = f"--kv-bits {cache.bits}", args.kv_group_size
            if "--kv-group-size" in args.typed and cache.group_size != size:
                raise ConfigError(
                    f"{path} has groups of {cache.group_size}, not --kv-group-size {size}. Drop that flag."
                )
        elif isinstance(cache, RotatingKVCache) and not isinstance(usual, RotatingKVCache):
            made_with = f"--max-kv-size {cache.max_size}"
    sizes = {"--kv-bits": args.kv_bits, "--max-kv-size": args.max_kv_size}
    for given in (f"{flag} {size}" for flag, size in sizes.items() if size is not None):
        if made_with is not None and given != made_with:
            raise ConfigError(f"{path} was made with {made_with}, not {given}. Drop that flag, or give {made_with}.")
        if made_with is None and given.startswith("--max-kv-size"):
            raise ConfigError(f"{path} was made without --max-kv-size, and {given} cannot shorten it. Drop that flag.")
    return made_with


def state_storage(request: Request) -> StateStorage:
    """Return how a command stores recurrent states; raise ConfigError for a wrong value."""
    fields = {"format": request.values["--state-format"], "step": request.values["--state-step"]}
    return StateStorage(**{name: value for name, value in fields.items() if value is not None})


def open_prefix_folder(request: Request, ranks: Ranks) -> Folder | None:
    return open_folder(request.prefix_cache, request.values["--prefix-cache-limit"] or LIMIT, ranks)


def check_positions(tokens: int, limit: int | None) -> None:
    """Raise ConfigError if a prompt leaves no room for an answer in the model's context."""
    if limit is not None and tokens >= limit:
        raise ConfigError(
            f"the prompt has {tokens:,} tokens; the model allows {limit:,}, answer included. Shorten the prompt, "
            "or use a model with a longer context."
        )


def free_memory() -> int:
    """Return the bytes that this process can still take: of the GPU's memory, else of RAM."""
    device = gpu_backend()
    if device is not None:  # a Mac recommends how much may be taken in all, CUDA knows what is free
        return usable_memory() - (mx.get_active_memory() if device == "metal" else 0)
    free = free_ram()
    if free is not None:
        return free
    raise ConfigError("free memory is unknown on this system; give --kv-memory-limit, such as 8GB.")


def check_memory(plan: Plan, tokens: int, limit: int | None, step: int) -> None:
    """Raise ConfigError if `tokens` tokens do not fit, with the context that fits.

    `limit` is the bytes of their cache; None is the free memory, into which the prefill has to fit too.
    """
    available = free_memory() if limit is None else limit
    prefill = partial(plan.transient_nbytes, step=step) if limit is None else None
    check_fits(tokens, step, available, partial(plan.cache_peak_nbytes, step=step), prefill)


def check_fits(
    tokens: int, step: int, available: int, caches: Callable[[int], int], prefill: Callable[[int], int] | None = None
) -> None:
    """Raise ConfigError if `tokens` tokens do not fit into `available` bytes, with the context that fits.

    `caches` and `prefill` return the bytes of a number of tokens; without `prefill`, only caches have to fit.
    """

    def needs(tokens: int) -> int:
        return caches(tokens) + (0 if prefill is None else prefill(tokens))

    if needs(tokens) <= available:
        return
    fits = next((n for n in (tokens * k // 64 for k in range(63, 0, -1)) if needs(n) <= available), 0)
    flag = "raise --kv-memory-limit" if prefill is None else "lower --prefill-step-size"
    remedy = f"Not even a short prompt fits: {flag}, or lower --kv-sinks and --kv-window."
    if fits:
        remedy = f"About {fits:,} tokens fit: shorten the prompt or --max-tokens, or use --kv-profile small."
    moment = (
        "" if prefill is None else f" and, in prefill steps of {step:,}, {human_bytes(prefill(tokens))} for a moment"
    )
    sizes = f"needs {human_bytes(caches(tokens))} of KV cache{moment}; {human_bytes(available)} are available"
    raise ConfigError(f"a context of {tokens:,} tokens {sizes}. {remedy}")
