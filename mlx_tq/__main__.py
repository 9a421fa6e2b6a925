"""Run `mlx_tq COMMAND`."""

import sys
from collections.abc import Sequence
from importlib import import_module

from mlx_tq import __version__
from mlx_tq.cli.runner import DONE, USAGE_ERROR, run_reporting_errors
from mlx_tq.errors import unknown_name

COMMANDS = {
    "generate": "generate text on a compressed KV cache",
    "server": "serve OpenAI's API on compressed KV caches",
    "connect": "set up a coding agent for a running server, or run it with one",
    "chat": "chat in the terminal, with eviction and recall",
    "cache_prompt": "prefill a prompt once and save its cache",
    "evaluate": "measure quality: perplexity, divergence, needles, formats",
    "calibrate": "calibrate eviction for a model",
    "bench": "measure speed against mlx-lm",
    "doctor": "show versions and backend, and test every codec",
    "store": "list, check or clear the prefix cache",
    "demo": "evict a fact, then recall it",
}


def main(words: Sequence[str] | None = None) -> int:
    """Run the command that the first word names; return its exit code."""
    command, *rest = (sys.argv[1:] if words is None else words) or [""]
    if command in COMMANDS:
        if words is None:
            del sys.argv[1]
        return int(import_module(f"mlx_tq.{command}").main(None if words is None else rest))
    return run_reporting_errors(command, lambda: _answer_without_command(command))


def _answer_without_command(word: str) -> int:
    commands = "".join(f"  {name:14}{text}\n" for name, text in COMMANDS.items())
    usage = f"usage: mlx_tq COMMAND [options]\n\n{commands}\nmlx_tq COMMAND --help shows its options.\n"
    if word in ("--version", "-V", "--help", "-h"):
        sys.stdout.write(f"{__version__}\n" if word in ("--version", "-V") else usage)
        return DONE
    sys.stderr.write(f"mlx_tq: {unknown_name('command', word, COMMANDS)}\n" if word else usage)
    return USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main())
