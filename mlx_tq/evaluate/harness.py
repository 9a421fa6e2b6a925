"""mlx-lm's own `mlx_lm.evaluate`, which runs tasks of lm-eval, with its model on compressed caches.

Tasks come from the hub: it is for machines that reach one.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from mlx_tq.config import KVConfig
from mlx_tq.errors import ConfigError
from mlx_tq.prompt_cache.compressed import compressed


def evaluation() -> Any:
    """mlx-lm's module.

    Raises:
        ConfigError: lm_eval, which it needs, is not installed.
    """
    try:
        return import_module("mlx_lm.evaluate")  # imports lm_eval, and with it torch: seconds
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed, which mlx-lm's evaluation needs; `pip install lm_eval`, and see that the "
            "machine reaches a model hub for the tasks."
        ) from error


def command_line(model: str | None, words: Sequence[str]) -> list[str]:
    """The arguments of `mlx_lm.evaluate`: tasks first, then its own flags.

    Raises:
        ConfigError: no task.
    """
    tasks = list(words)[: next((place for place, word in enumerate(words) if word.startswith("-")), len(words))]
    if not tasks:
        raise ConfigError(
            "no task is named; write them behind --, as in `mlx_tq.evaluate lm-eval -- arc_easy --limit 100`."
        )
    return ["--model", model or "embedded", "--tasks", *words]


def run_tasks(module: Any, model: Any, tokenizer: Any, config: KVConfig, arguments: list[str]) -> None:
    """Run `mlx_lm.evaluate` with these arguments on this model, whose caches are stored as `config` says."""
    with _arguments(arguments), _loading(module, model, tokenizer), compressed(model, config):
        module.main()


@contextmanager
def _arguments(words: list[str]) -> Iterator[None]:
    before = sys.argv
    sys.argv = ["mlx_lm.evaluate", *words]
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def _loading(module: Any, model: Any, tokenizer: Any) -> Iterator[None]:
    """Let the module get this model, loaded as our flags say, in the place of the one that it would load."""
    before = module.load
    module.load = lambda *path, **options: (model, tokenizer)
    try:
        yield
    finally:
        module.load = before
