"""Run `mlx_tq.server` with a model that writes given answers: `python scripted_server.py FOLDER [flags of the server]`.

`script.json` in the folder has the answers to come. They are for requests with tools, or for those without if
`need_tools` is false; `text` is for all others. An answer is a text or a call `{"name": ..., "arguments": {...}}`.
What is asked is added to `requests.jsonl`. All else, grammars of calls included, is the server's own.
"""

import json
import re
import sys
from pathlib import Path

from mlx_tq.cli.fast_blas import use_fast_blas
from mlx_tq.files import atomic_write

FOLDER = Path(sys.argv[1])


def record(request):
    tools = [tool["function"] for tool in request.callable_tools]
    messages = [message.model_dump(exclude_none=True) for message in request.messages]
    with (FOLDER / "requests.jsonl").open("a") as requests:
        requests.write(json.dumps({"tools": tools, "messages": messages}) + "\n")


def next_answer(request):
    """Take the next answer from the script."""
    path = FOLDER / "script.json"
    script = json.loads(path.read_text())
    if bool(request.callable_tools) != script["need_tools"] or not script["answers"]:
        return script["text"]
    answer = script["answers"].pop(0)
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(script))
    if isinstance(answer, str):
        return answer
    arguments = json.dumps(answer["arguments"], sort_keys=True)  # the order that the server gives the definitions
    return f'<tool_call>{{"name": "{answer["name"]}", "arguments": {arguments}}}</tool_call>'


class ScriptedTokens:
    """A logits processor that lets a model generate one text."""

    def __init__(self, tokenizer, text):
        parts = re.findall("<|[^<]+", text)  # so that no mark becomes a control token
        self._tokens = [token for part in parts for token in tokenizer.encode(part, add_special_tokens=False)]
        self._tokens.append(tokenizer.eos_token_id)
        self._prompt_length = None

    def __call__(self, tokens, logits):
        if self._prompt_length is None:
            self._prompt_length = len(tokens)
        index = min(len(tokens) - self._prompt_length, len(self._tokens) - 1)
        logits[:, self._tokens[index]] = 1e4
        return logits


def script_answers():
    """Put the script's answers in the place of the model's."""
    from mlx_tq.server.model_service import ModelService  # loads mlx

    prepare = ModelService.prepare

    def prepare_scripted(self, request, *args, **options):
        jobs, *rest = prepare(self, request, *args, **options)
        record(request)
        for job in jobs:
            job.processors.insert(0, ScriptedTokens(self._tokenizer, next_answer(request)))
        return jobs, *rest

    ModelService.prepare = prepare_scripted


if __name__ == "__main__":
    use_fast_blas()  # before mlx is loaded
    script_answers()
    from mlx_tq.server import main

    sys.exit(main(sys.argv[2:]))
