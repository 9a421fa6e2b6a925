"""The golden runs that call the library, on tiny random models in float32; prints each as a line of JSON.

python benchmarks/golden/library.py START_OF_A_NAME today|then
"""

import json
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import adapter
import mlx.core as mx
from cases import ARCHITECTURES, CONFIGS, DRAFTED, EVICTIONS, REGIONS, STORAGES, Options
from mlx_lm import batch_generate
from mlx_lm.generate import generate_step, speculative_generate_step

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from zoo import build  # the models' configurations are the tests'

TOKENS, STEP, PLANNED = 16, 48, 1000
LENGTHS = (150, 40, 97)
_STUB = SimpleNamespace(eos_token_ids=[], decode=str)

Found = dict[str, Any]
_model = cache(build)


def _prompt(length: int, row: int = 0) -> list[int]:
    return [(7 * i * i + (3 + 2 * row) * i) % 160 for i in range(length)]


def _words(tokens: Any) -> str:
    return " ".join(map(str, tokens))


def _single(model: Any, config: Any) -> Found:
    storage = adapter.Storage(model, config)
    caches, ids = storage.caches(), mx.array(_prompt(LENGTHS[0]))
    with adapter.serving(model):
        steps = generate_step(ids, model, max_tokens=TOKENS, prompt_cache=caches, prefill_step_size=STEP)
        said, sure = zip(*((token, logprobs[token].item()) for token, logprobs in steps), strict=True)
    return {
        "plan": [*storage.text(PLANNED).splitlines(), "planned {:,} bytes of {:,}".format(*storage.nbytes(PLANNED))],
        "tokens": _words(said),
        "logprob": sum(sure),
        **adapter.contents(caches),
    }


def _batch(model: Any, config: Any) -> list[Found]:
    with adapter.serving(model, config):
        out = batch_generate(
            model,
            _STUB,
            [_prompt(length, row) for row, length in enumerate(LENGTHS)],
            max_tokens=TOKENS,
            prefill_step_size=STEP,
            return_token_ids=True,
            return_prompt_caches=True,
        )
    rows = zip(out.token_ids, out.caches, strict=True)
    return [{"tokens": _words(said), **adapter.contents(caches)} for said, caches in rows]


def _speculative(model: Any, draft: Any, config: Any) -> Found:
    ours, drafts = adapter.Storage(model, config).caches(), adapter.Storage(draft, config).caches()
    with adapter.serving(model), adapter.serving(draft):
        steps = speculative_generate_step(
            mx.array(_prompt(LENGTHS[0])),
            model,
            draft,
            num_draft_tokens=3,
            max_tokens=TOKENS,
            prompt_cache=[*ours, *drafts],
            prefill_step_size=STEP,
        )
        said = list(islice(steps, TOKENS))
    return {
        "tokens": _words(token for token, _, _ in said),
        "drafted": sum(drafted for _, _, drafted in said),
        "model": adapter.contents(ours),
        "draft": adapter.contents(drafts),
    }


def _cases(then: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    def config(options: Options) -> Any:
        return adapter.config(then, **{**REGIONS, **options})

    for name in ARCHITECTURES:
        for kind, options in CONFIGS.items():
            about = f"library {name} {kind}"

            def run(way: Callable[..., Any], *seeds: int, name: str = name, options: Options = options) -> Any:
                return way(*(_model(name, seed=seed) for seed in (0, *seeds)), config(options))

            yield f"{about} single", partial(run, _single)
            yield f"{about} batch", partial(run, _batch)
            if name in DRAFTED:
                yield f"{about} speculative", partial(run, _speculative, 1)
    tri = CONFIGS["triattention"]
    for kind, options in STORAGES.items():
        yield f"library llama {kind}", lambda options=options: _single(_model("llama"), config(options))
    for kind, changes in EVICTIONS.items():
        options = {**tri, "evict": {**tri["evict"], **changes}}
        if changes.get("mode") in ("v1", "v2"):
            options["prefix"] = 0
        yield f"library glm4 {kind}", lambda options=options: _single(_model("glm4"), config(options))
    for name, of_values in adapter.formats().items():
        options = {"key": name, "value": name if of_values else "tq4"}
        yield f"library qwen3 {name}", lambda options=options: _single(_model("qwen3"), config(options))


def main(start: str, defaults: str) -> None:
    """Run the cases whose names begin with `start`. A case that raises is recorded as what it says."""
    for name, run in _cases(then=defaults == "then"):
        if name.startswith(start):
            try:
                found = run()
            except Exception as error:  # noqa: BLE001  of a refusal, and of whatever a change may break
                found = {"raises": f"{type(error).__name__}: {error}"}
            print(json.dumps([name, found]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
