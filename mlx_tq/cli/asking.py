"""See that eviction knows what questions look for: gathered once a model, and kept in the user's cache folder."""

from pathlib import Path
from typing import Any

from mlx_tq.cli.calibrating import queries_of_questions, save_queries
from mlx_tq.cli.haystack import load_text
from mlx_tq.cli.losing import measure_losses
from mlx_tq.cli.progress import prefill_progress
from mlx_tq.cli.screen import console, warn
from mlx_tq.config import KVConfig
from mlx_tq.distributed.group import Ranks
from mlx_tq.errors import CacheFormatError, ConfigError
from mlx_tq.models import fingerprint, ranks_of
from mlx_tq.policies import CalibratedPolicy
from mlx_tq.prompt_cache.compressed import plan_caches
from mlx_tq.prompt_cache.known_queries import kept_queries, make_folder
from mlx_tq.prompt_cache.losses import kept_losses, known_losses, save_losses


def ask_beforehand(model: Any, tokenizer: Any, *configs: KVConfig) -> None:
    """Gather what `configs` ask to know of the model: what eviction is to keep, and what each layer loses.

    Where no statistics can be had a warning says why, and the plan that the policy is blind.

    Raises:
        MlxTqError: `model` cannot be run under one of these configurations.
    """
    for config in configs:
        if config.mean_bits is not None and known_losses(fingerprint(model)) is None:
            measure(model, tokenizer, load_text())
        policy = None if config.evict is None else config.evict.policy
        if (
            not isinstance(policy, CalibratedPolicy)
            or not policy.uses_auto_calibration
            or not plan_caches(model, config).is_blind
        ):
            continue
        path = kept_queries(fingerprint(model), covariance=policy.needs_covariance)
        try:
            _gather(model, tokenizer, path, covariance=policy.needs_covariance)
        except (CacheFormatError, ConfigError) as error:
            warn(
                f"what questions look for in this model could not be gathered ({error}). {policy.name} learns from the "
                "text that it reads, and may drop what a question will ask for. Name a file with --kv-calibration, "
                "or pass --kv-calibration text."
            )


def measure(model: Any, tokenizer: Any, text: str) -> None:
    """Measure what each layer of the model loses on a text, and keep it in the user's cache folder.

    Raises:
        MlxTqError: it cannot be measured, or not kept.
    """
    path = kept_losses(fingerprint(model))
    make_folder(path)  # before the work, not after it
    with prefill_progress(what="measuring what each layer loses, once") as progress:
        found = measure_losses(model, tokenizer, text, progress)
    save_losses(path, found)
    console.print(f"what each layer loses is kept in {path}", style="dim", markup=False, soft_wrap=True)


def _agree_on_folder(path: Path, ranks: Ranks) -> None:
    """As `make_folder`; where one rank has none, none of them begins the work."""
    refused: ConfigError | None = None
    try:
        make_folder(path)
    except ConfigError as error:
        refused = error
    if ranks.any([refused is not None])[0]:
        raise refused or ConfigError("another rank has no folder for them.")


def _gather(model: Any, tokenizer: Any, path: Path, *, covariance: bool) -> None:
    _agree_on_folder(path, ranks_of(model))  # before the work, not after it
    with prefill_progress(what="asking the model questions, once") as progress:
        found = queries_of_questions(model, tokenizer, load_text(), covariance=covariance, progress=progress)
    save_queries(model, path, found)
    console.print(f"statistics of questions and text are kept in {path}", style="dim", markup=False, soft_wrap=True)
