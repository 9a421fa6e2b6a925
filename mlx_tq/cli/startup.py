"""Refuse what cannot be done before anything slow is imported: mlx-lm and transformers take seconds."""

import argparse
import sys
import warnings
from dataclasses import replace
from pathlib import Path

from mlx_tq.cli.options import OFF, Request, given_models
from mlx_tq.distributed.launch import is_launched, launched_rank
from mlx_tq.errors import CacheFormatError, RescueError
from mlx_tq.models import EMBEDDED, find_source
from mlx_tq.policies import CalibratedPolicy
from mlx_tq.prefix_cache.folder import open_folder
from mlx_tq.rescue import open_service


def check_request(request: Request) -> Request:
    """Return the request as `check_rescue` does, with the profile that fits into --memory, if that is given.

    Raises MlxTqError for a folder, file or model that cannot be used, and for too little memory.
    """
    request, args = check_rescue(request), request.args
    if not is_launched():  # else each rank has a folder of its own
        open_folder(request.prefix_cache)
    saved = args.decode if args.command == "cache_prompt" else getattr(args, "prompt_cache_file", None)
    policy = None if request.config.evict is None else request.config.evict.policy
    calibration = policy.file if isinstance(policy, CalibratedPolicy) else None
    for path, kind, maker in (
        (saved, "cache file", "mlx_tq.cache_prompt"),
        (getattr(args, "load", None), "saved conversation", "/save in mlx_tq.chat"),
        (calibration, "calibration file", "mlx_tq.calibrate"),
    ):
        if path is not None and not is_launched() and not Path(path).is_file():  # ranks are counted first
            raise CacheFormatError(f"there is no {kind} {path}. Make one with {maker}.")
    check_model(args)
    note_loading(args)
    if getattr(args, "memory", None) is not None:
        from mlx_tq.cli.memory_fit import fit_memory  # imports mlx-lm

        request = fit_memory(request)
    return request


def note_loading(args: argparse.Namespace) -> None:
    """Say on a terminal what is loaded, before the imports that take seconds."""
    if sys.stderr.isatty() and getattr(args, "verbose", True):
        print(f"Loading {', '.join(name or EMBEDDED for name in given_models(args))}", file=sys.stderr)  # noqa: T201


def check_model(args: argparse.Namespace) -> None:
    """Raise ConfigError for models and adapters that cannot be there."""
    models = given_models(args)
    for model in models:
        find_source(model, getattr(args, "adapter_path", None) if len(models) == 1 else None)
    if getattr(args, "draft_model", None) is not None:
        find_source(args.draft_model)


def check_rescue(request: Request) -> Request:
    """Return the request, with rescue off and a warning if only the default asks for it and its extra is missing.

    Raises:
        ConfigError: --rescue is not an address.
        RescueError: --rescue auto was chosen, and its extra is missing.
    """
    if request.rescue.service == OFF or launched_rank():  # the first of several ranks has the service
        return request
    fault = open_service(request.rescue.service).missing_package_error()
    if fault is None:
        return request
    if request.values["--rescue"] is not None:
        raise RescueError(fault)
    recalls = request.config.evict is not None and request.config.evict.recalls
    rest = "recalled from the archive only" if recalls else "dropped"
    warnings.warn(f"{fault} Until then, evicted tokens are {rest}. --rescue off hides this warning.", stacklevel=2)
    return replace(request, rescue=replace(request.rescue, service=OFF))
