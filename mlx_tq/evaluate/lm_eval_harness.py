"""Run tasks of lm-eval through mlx-lm's evaluation, with the model on compressed caches.

The tasks come from a model hub, so the machine must reach one.
"""

import argparse
import os
from importlib import import_module
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import make_sampler

from mlx_tq.config import KVConfig
from mlx_tq.errors import ConfigError
from mlx_tq.evaluate.results import Record
from mlx_tq.prompt_cache.compressed import compressed


def import_lm_eval() -> tuple[Any, Any]:
    try:
        return import_module("lm_eval"), import_module("mlx_lm.evaluate")  # torch takes seconds to load
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed, which mlx-lm's evaluation needs; `pip install lm_eval`, and see that the "
            "machine reaches a model hub for the tasks."
        ) from error


def run_tasks(args: argparse.Namespace, model: Any, tokenizer: Any, config: KVConfig) -> dict[str, Record]:
    """Return the metrics of each task, as lm-eval names them."""
    lm_eval, evaluate = import_lm_eval()

    class LoadedModel(evaluate.MLXLM):  # type: ignore[misc, name-defined]
        """Has the attributes of MLXLM, whose constructor would load a model by name."""

        apply_chat_template = evaluate.chat_template_fn(**args.chat_template_args)

        def __init__(self) -> None:
            super(evaluate.MLXLM, self).__init__()
            self._model, self.tokenizer = model, tokenizer
            self._max_tokens, self._batch_size = args.max_tokens, args.batch_size
            self._sampler = make_sampler(temp=args.temp, top_p=args.top_p, min_p=args.min_p, top_k=args.top_k)
            self.use_chat_template = args.apply_chat_template
            if self.use_chat_template is None:
                self.use_chat_template = tokenizer.chat_template is not None

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # silences warnings of lm-eval's processes
    mx.random.seed(args.seed)
    seeds = {f"{name}_random_seed": args.seed for name in ("numpy", "torch", "fewshot")}
    with compressed(model, config):
        lm = LoadedModel()
        results = lm_eval.simple_evaluate(
            model=lm,
            tasks=args.tasks,
            num_fewshot=args.num_shots,
            limit=args.limit,
            fewshot_as_multiturn=args.fewshot_as_multiturn,
            apply_chat_template=lm.use_chat_template,
            random_seed=args.seed,
            confirm_run_unsafe_code=args.confirm_run_unsafe_code,
            **seeds,
        )
    return dict(results["results"])
